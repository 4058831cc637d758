// The picture that an edit starts from. It outlives a reload.

import { byId } from "./elements.js";
import { openExtender, startExtender } from "./extender.js";
import { showSource } from "./form.js";
import { announce, refuseFile } from "./notices.js";
import { openPainter, startPainter } from "./painter.js";
import * as store from "./store.js";

const WORK = "source";

/** { file, name, width, height, mask: a PNG or null }; null: no edit. */
export let source = null;
let url;
let urlOfMask;

export async function startSource() {
  byId("choose").onclick = () => byId("source-file").click();
  byId("source-file").onchange = (event) => {
    useFile(event.target.files[0]);
    event.target.value = "";
  };
  startPainter();
  startExtender();
  byId("extend").onclick = () => openExtender(source, url, setSource);
  byId("mask").onclick = () =>
    openPainter(source, url, (mask) => setSource({ ...source, mask }));
  byId("source-remove").onclick = () => {
    setSource(null);
    byId("choose").focus();
  };
  addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find(({ type }) => type.startsWith("image/"));
    if (!file || !canEdit() || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    useFile(file, "the pasted picture");
  });
  const kept = await store.keptWork(WORK).catch(() => null);
  if (kept && !source) setSource(kept);
}

export const canEdit = () => !byId("source").hidden;

export async function useFile(file, name = file.name, mask = null) {
  try {
    const { width, height } = await createImageBitmap(file);
    await setSource({ file, name, width, height, mask });
  } catch {
    refuseFile(name);
    return false;
  }
  announce(`${name} is the source now.`);
  return true;
}

export async function editPicture(picture) {
  if (await useFile(picture.file, picture.params.prompt)) byId("ask").elements.prompt.focus();
}

export function keepSource({ file, mask }, { image_sha256: digest, mask_sha256: digestOfMask }) {
  store.keepSource(digest, file).catch(() => {});
  if (mask) store.keepSource(digestOfMask, mask).catch(() => {});
}

export function setSource(next) {
  source = next;
  for (const old of [url, urlOfMask]) URL.revokeObjectURL(old);
  url = next && URL.createObjectURL(next.file);
  urlOfMask = next?.mask ? URL.createObjectURL(next.mask) : "";
  for (const id of ["held", "mask", "extend"]) byId(id).hidden = !next;
  byId("source-mask").hidden = !next?.mask;
  byId("source-mask").src = urlOfMask;
  byId("mask").textContent = next?.mask ? "Change mask…" : "Paint mask…";
  byId("choose").textContent = next ? "Another…" : "Start from a picture…";
  if (next) {
    byId("source-image").src = url;
    byId("source-name").textContent = next.name;
    byId("source-size").textContent = `${next.width} × ${next.height}`;
  }
  showSource(next);
  return store.keepWork(WORK, next).catch(() => {});
}
