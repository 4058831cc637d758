// One large picture, with its parameters.

import { byId, make } from "./elements.js";
import { writeForm } from "./form.js";
import { factsOf, fileName, settingsOf } from "./parameters.js";
import { curlOf } from "./requests.js";
import { restore } from "./restoring.js";
import { canEdit, editPicture } from "./source.js";
import { keptSource } from "./store.js";
import { makeWipe } from "./wipe.js";
import { isZoomed, setScale, startZoom, zoom } from "./zoom.js";

const viewer = byId("viewer");
const ACTIONS = {
  close: () => viewer.close(),
  use: () => {
    viewer.close();
    restore(shown.params, "the picture");
  },
  edit: () => {
    viewer.close();
    editPicture(shown);
  },
  upscale: async () => {
    viewer.close();
    await editPicture(shown);
    // Step numbers and the upscaler belong to this picture.
    const own = { deep_steps: "", guided_steps: "", upscaler: "", upscale_steps: "" };
    const anew = { size: "auto", strength: "", upscale: 2, upscale_strength: 0.2 };
    writeForm({ ...settingsOf(shown.params), ...own, ...anew });
    byId("ask").requestSubmit();
  },
  wipe: () => showWipe(!wipe),
  star: () => {
    gallery.star(shown, !shown.isFavourite);
    showStar();
  },
  newer: () => step(-1),
  older: () => step(1),
  copy: async () => {
    await navigator.clipboard.writeText(curlOf(settingsOf(shown.params), shown.params));
    button("copy").textContent = "Copied";
  },
  remove: () => {
    const next = gallery.neighbour(shown, 1) ?? gallery.neighbour(shown, -1);
    gallery.remove(shown);
    if (next) show(next);
    else viewer.close();
  },
};

const button = (does) => viewer.querySelector(`[data-do=${does}]`);

let shown;
let gallery;
let before;
let wipe = null;

export function startViewer() {
  startZoom();
  viewer.onclick = ({ target }) => { if (target === viewer) viewer.close(); };
  viewer.onclose = () => byId("notices").append(...viewer.querySelectorAll(".notice"));
  for (const does of Object.keys(ACTIONS)) button(does).onclick = ACTIONS[does];
  viewer.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by && !isZoomed() && !wipe?.contains(event.target)) step(by);
    if (!event.ctrlKey) zoom(event.key);
  };
  // Only secure origins may write to the clipboard.
  button("copy").hidden = !navigator.clipboard;
}

export function openViewer(picture, of) {
  gallery = of;
  for (const each of viewer.querySelectorAll(".edits")) each.hidden = !canEdit();
  show(picture);
  viewer.showModal();
  byId("view").focus();
}

function step(by) {
  const next = gallery.neighbour(shown, by);
  if (next) show(next);
}

function show(picture) {
  shown = picture;
  showWipe(false);
  findBefore(picture);
  const image = byId("viewer-image");
  image.src = picture.url;
  image.alt = picture.params.prompt;
  const rows = factsOf(picture).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  byId("viewer-facts").replaceChildren(...rows);
  Object.assign(byId("download"), { href: picture.url, download: fileName(picture) });
  showStar();
  button("newer").disabled = !gallery.neighbour(picture, -1);
  button("older").disabled = !gallery.neighbour(picture, 1);
  button("copy").textContent = "Copy as curl";
}

function showStar() {
  button("star").ariaPressed = Boolean(shown.isFavourite);
  button("star").textContent = `${shown.isFavourite ? "★" : "☆"} Favourite`;
}

async function findBefore({ params }) {
  byId("wipe").hidden = true;
  const digest = params.image_sha256;
  before = digest && (await keptSource(digest).catch(() => undefined));
  byId("wipe").hidden = !before;
}

function showWipe(isShown) {
  if (wipe) URL.revokeObjectURL(wipe.querySelector(".before").src);
  wipe?.remove();
  setScale(null);
  const { url, params } = shown;
  const size = [params.width, params.height];
  wipe = isShown ? makeWipe(URL.createObjectURL(before), url, size, ["before", "after"]) : null;
  byId("viewer-image").hidden = isShown;
  byId("wipe").ariaPressed = isShown;
  if (!wipe) return;
  byId("view").append(wipe);
  wipe.querySelector("input").focus();
}
