// A picture that is dropped on the page, or chosen from disk, gives its settings back.

import { byId } from "./elements.js";
import { writeForm } from "./form.js";
import { notify } from "./notices.js";
import { settingsOf } from "./parameters.js";
import { parametersIn } from "./picture_file.js";

/** `modelNow()` is the id of the model that serves. */
export function startRestoring(modelNow) {
  const curtain = byId("drop");
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    curtain.hidden = false;
  });
  addEventListener("dragleave", (event) => {
    // Leaving one element for another has somewhere to go; leaving the window has not.
    if (!event.relatedTarget) curtain.hidden = true;
  });
  addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    curtain.hidden = true;
    restoreFile(event.dataTransfer.files[0], modelNow());
  });
  byId("open").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", (event) => {
    restoreFile(event.target.files[0], modelNow());
    event.target.value = "";
  });
}

async function restoreFile(file, model) {
  const params = await parametersIn(file);
  if (params) restore(params, file.name, model);
  else notify(`${file.name} does not say how it was made. Needed: a PNG from this service.`, {
    kind: "error",
  });
}

export function restore(params, name, model) {
  writeForm(settingsOf(params));
  byId("more").open = true;
  let promise = "Generate makes the same picture.";
  if (params.model && model && params.model !== model) {
    promise = `It was made by ${params.model}, so ${model} will make another picture of it.`;
  }
  notify(`The settings are those of ${name}. ${promise}`);
  byId("prompt").focus();
}
