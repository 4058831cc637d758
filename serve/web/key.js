// The API key: for this tab, or stored in this browser on request.

import { ask, byId } from "./elements.js";

const NAME = "api-key";

export const storedKey = () => sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME);

export function forgetKey() {
  sessionStorage.removeItem(NAME);
  localStorage.removeItem(NAME);
}

export async function askForKey() {
  const wasRefused = storedKey() !== null;
  byId("key-text").textContent = wasRefused
    ? "The key that was used is not valid here."
    : "The service's operator has it. It begins with sk-.";
  byId("key-input").value = "";
  if ((await ask(byId("key-dialog"))) !== "use") return false;
  forgetKey();
  const place = byId("key-remember").checked ? localStorage : sessionStorage;
  place.setItem(NAME, byId("key-input").value.trim());
  return true;
}
