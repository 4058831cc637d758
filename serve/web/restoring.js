// Restores the settings of a picture that is dropped or opened.

import { model, models } from "./connection.js";
import { byId } from "./elements.js";
import { writeForm } from "./form.js";
import { restoreMaps } from "./maps.js";
import { notify } from "./notices.js";
import { isEdit, picturedOf, settingsOf } from "./parameters.js";
import { parametersIn, textsIn } from "./picture_file.js";
import { readSettings } from "./service.js";
import { canEdit, setSource, useFile } from "./source.js";
import * as store from "./store.js";

/** Places to drop a picture at, and the lists that take it, if the model has such files. */
const LISTS = { "#drop-map": "controls", "#drop-prompt": "image_prompts" };
const listOf = (id) => document.querySelector(`#${LISTS[id]}-field:not([hidden])`);

export function startRestoring() {
  const curtain = byId("drop");
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    curtain.hidden = false;
    byId("drop-source").hidden = !canEdit();
    for (const id in LISTS) document.querySelector(id).hidden = !listOf(id);
  });
  addEventListener("dragleave", (event) => {
    // Leaving the window has no related element.
    if (!event.relatedTarget) curtain.hidden = true;
  });
  addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    curtain.hidden = true;
    const file = event.dataTransfer.files[0];
    const isOn = (id) => event.target.closest?.(id);
    const place = Object.keys(LISTS).find(isOn);
    if (place) listOf(place).useMap(file);
    else if (canEdit() && !isOn("#drop-settings")) useFile(file);
    else restoreFile(file);
  });
  byId("open").onclick = () => byId("file").click();
  byId("file").onchange = (event) => {
    restoreFile(event.target.files[0]);
    event.target.value = "";
  };
}

async function restoreFile(file) {
  const own = await parametersIn(file);
  if (own) return restore(own, file.name);
  const texts = await textsIn(file);
  const other = (texts.parameters || texts.prompt) && await readSettings(texts).catch(() => null);
  if (other) return restore(other.params, file.name, other.unread);
  const needed = "Needed: a PNG from here, stable-diffusion-webui or ComfyUI.";
  notify(`${file.name} does not say how it was made. ${needed}`, { kind: "error" });
}

/** `unread`: what is no setting here, of another program's picture. */
export async function restore(params, name, unread) {
  const hasSource = await restoreSource(params, name);
  const hasMaps = await restoreMaps(picturedOf(params));
  const served = models.find(({ id }) => params.model && bare(id) === bare(params.model));
  writeForm({ ...settingsOf(params), ...(served && { model: served.id }) });
  byId("more").open = true;
  let promise = "Generate makes the same picture.";
  if (params.model && model && bare(params.model) !== bare(model.id)) {
    promise = `It was made by ${params.model}, so ${model.id} will make another picture of it.`;
  }
  if (unread) promise = "Another program made it, so the picture will differ.";
  if (unread?.length) promise += ` Left out: ${unread.join("; ")}.`;
  if (!hasMaps) promise = "It was made with maps or image prompts that are not here; add them again.";
  if (!hasSource) promise = "It was made from another picture; choose that one to make it again.";
  notify(`The settings are those of ${name}. ${promise}`);
  byId("prompt").focus();
}

/** `mini` and `sdxl-mini` are the same. */
const bare = (id) => id.replace(/^sdxl-/, "");

async function restoreSource(params, name) {
  setSource(null);
  if (!isEdit(params)) return true;
  const [image, mask] = await Promise.all([params.image_sha256, params.mask_sha256].map(
    (digest) => digest && store.keptSource(digest).catch(() => null),
  ));
  const isWhole = Boolean(image) && Boolean(mask || !params.mask_sha256);
  return isWhole && useFile(image, `what ${name} was made from`, mask ?? null);
}
