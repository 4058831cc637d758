// Messages, on the page and for screen readers.

import { byId, make, openAround } from "./elements.js";
import { controlFor } from "./parameters.js";

export function announce(text) {
  byId("announcer").textContent = text;
}

/** One notice at a time. `action` is [label, function]; `field` is the wrong field. */
export function notify(text, { kind = "info", action = null, field = null } = {}) {
  const close = make("button", { class: "quiet", "aria-label": "Dismiss", onclick: dismiss }, "✕");
  const buttons = action
    ? [make("button", { class: "secondary", onclick: action[1] }, action[0])]
    : [];
  const words = make("p", { id: "said", role: kind === "error" ? "alert" : "status" }, text);
  const notice = make("div", { class: "notice", "data-kind": kind }, words, ...buttons, close);
  dismiss();
  if (field) field.after(notice);
  // Behind an open viewer nothing can be clicked.
  else (document.querySelector("dialog[open] .facts") ?? byId("notices")).append(notice);
  notice.scrollIntoView({ block: "nearest" });
  return words;
}

export const refuseFile = (name) => notify(
  `${name} is not a picture that this browser can read. Needed: a PNG, JPEG or WebP file.`, { kind: "error" });

export const dismiss = () => byId("said")?.parentNode.remove();

export function explain(error, again) {
  const action = ["Try again", again];
  if (error.status === 429) return busy(error, action);
  const words = wordsFor(error);
  if (error.status !== 400) return notify(words, { kind: "error", action });
  notify(words, { kind: "error", field: markField(error.param) });
}

function wordsFor({ status, message }) {
  if (status === 0) {
    return "The service does not answer, or the connection broke. What was finished is kept.";
  }
  if (status === 400) return `That cannot be made. ${message}`;
  if (status === 401) return "The service needs a valid key.";
  if (status === 503) return `The service is not ready. ${message}`;
  return message || `The service failed (${status}).`;
}

/** The button counts down; the text is announced once. */
function busy({ message, retryAfterS }, [label, again]) {
  let left = retryAfterS ?? 1;
  const text = `The service is busy. ${message} Try again in ${left} s.`;
  const button = notify(text, { kind: "error", action: [label, again] }).nextElementSibling;
  const tick = () => {
    button.disabled = left > 0;
    button.textContent = left > 0 ? `${label} in ${left} s` : label;
    left -= 1;
    if (left >= 0 && button.isConnected) setTimeout(tick, 1000);
  };
  tick();
}

function markField(param) {
  const field = byId("ask").elements[controlFor(param)];
  if (!(field instanceof HTMLElement)) return;
  openAround(field);
  field.ariaInvalid = "true";
  field.setAttribute("aria-errormessage", "said");
  field.focus();
  return field.closest(".field, .row");
}
