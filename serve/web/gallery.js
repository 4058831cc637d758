// The gallery: every picture made in this browser, the newest first.

import { ask, byId, download, make } from "./elements.js";
import { notify } from "./notices.js";
import { fileName, picturedOf, secondsWords } from "./parameters.js";
import * as store from "./store.js";
import { openViewer } from "./viewer.js";
import { MOST_BYTES, zipOf } from "./zip.js";

const PAGE = 48;

let pictures = [];
let shown = PAGE;
/** The selected ones, or null while none can be selected. */
let selected = null;

const isFiltered = () => byId("favourites").ariaPressed === "true";

export async function startGallery() {
  byId("older").onclick = () => {
    shown += PAGE;
    render();
  };
  byId("favourites").onclick = () => {
    byId("favourites").ariaPressed = !isFiltered();
    render();
  };
  byId("select").onclick = () => {
    selected = selected ? null : new Set();
    render();
  };
  byId("zip").onclick = downloadZip;
  byId("clear").onclick = clear;
  try {
    const kept = (await store.kept()).reverse().map(withUrl);
    // Some may have been made meanwhile.
    pictures = [...pictures, ...kept];
    await store.keepSourcesOf(new Set(pictures.flatMap(sourcesOf)));
  } catch {
    notify("This browser stores nothing for this page: the gallery ends with it.");
  }
  render();
}

export function addPicture(picture) {
  const added = withUrl(picture);
  pictures.unshift(added);
  render();
  added.saving = save(added);
  return added;
}

export const open = (picture) => openViewer(picture, { neighbour, remove, star });

async function save(picture) {
  const { url, saving, ...kept } = picture;
  try {
    picture.id = await store.keep(kept);
  } catch {
    notify("There is no room for more pictures in this browser. Remove some.");
  }
}

const sourcesOf = ({ params }) =>
  [params.image_sha256, params.mask_sha256, ...picturedOf(params).map(({ image }) => image)];

const withUrl = (picture) => ({ ...picture, url: URL.createObjectURL(picture.file) });

const visible = () => pictures.filter(({ isFavourite }) => isFavourite || !isFiltered());

/** 1: the next older; -1: the next newer. */
const neighbour = (picture, step) => visible()[visible().indexOf(picture) + step];

async function star(picture, isFavourite) {
  picture.isFavourite = isFavourite;
  showTools();
  // Its number comes with the first writing.
  await picture.saving;
  await save(picture);
}

async function remove(...removed) {
  pictures = pictures.filter((each) => !removed.includes(each));
  if (selected) selected = new Set();
  render();
  for (const { id } of removed) if (id !== undefined) await store.remove(id);
  if (removed.length > 1) return;
  notify("One picture was removed.", { action: ["Undo", () => addPicture(removed[0])] });
}

/** Favourites only if they are selected. */
const removable = () =>
  selected ? [...selected] : isFiltered() ? [] : pictures.filter(({ isFavourite }) => !isFavourite);

const downloadable = () => (selected ? pictures.filter((each) => selected.has(each)) : visible());

async function clear() {
  const removed = removable();
  byId("confirm-title").textContent = `Remove ${removed.length} picture${removed.length > 1 ? "s" : ""}?`;
  byId("favourites-stay").hidden = selected !== null || removed.length === pictures.length;
  if ((await ask(byId("confirm-dialog"))) === "yes") await remove(...removed);
}

async function downloadZip() {
  const chosen = downloadable();
  const bytes = chosen.reduce((sum, { file }) => sum + file.size, 0);
  if (bytes > MOST_BYTES) return notify("A zip file holds at most 4 GB. Select fewer pictures.", { kind: "error" });
  const files = chosen.map((picture, i) =>
    ({ ...picture, name: `${String(i + 1).padStart(3, "0")}-${fileName(picture)}` }));
  download(await zipOf(files), "pictures.zip");
}

function render() {
  const all = visible();
  byId("thumbs").replaceChildren(...all.slice(0, shown).map(thumb));
  byId("older").hidden = all.length <= shown;
  showTools();
}

function showTools() {
  const chosen = downloadable();
  byId("favourites").hidden = !isFiltered() && !pictures.some(({ isFavourite }) => isFavourite);
  byId("select").hidden = byId("zip").hidden = !pictures.length;
  byId("select").ariaPressed = selected !== null;
  byId("zip").disabled = !chosen.length;
  byId("clear").hidden = !removable().length;
  byId("clear").textContent = selected ? "Remove selected" : "Remove all";
  byId("gallery-note").textContent = selected ? `${selected.size} selected` : pictures.length
    ? `${chosen.length} kept in this browser only`
    : "Your pictures are kept in this browser only.";
}

function thumb(picture) {
  const { prompt, cache_interval: interval } = picture.params;
  const image = make("img", { src: picture.url, alt: "", loading: "lazy" });
  const facts = picture.isFlagged
    ? "blurred as unsafe"
    : `${secondsWords(picture.seconds)}, DeepCache ${interval > 1 ? interval : "off"}`;
  const words = make("span", { class: "words" }, prompt);
  const box = (name, isChecked, onchange) => {
    const input = make("input", { type: "checkbox", class: name, "aria-label": `${name}: ${prompt}` });
    input.checked = isChecked;
    input.onchange = () => onchange(input.checked);
    return input;
  };
  const favourite = box("Favourite", picture.isFavourite, (isOn) => star(picture, isOn));
  const select = selected && box("Select", selected.has(picture), (isOn) => {
    selected[isOn ? "add" : "delete"](picture);
    showTools();
  });
  const onclick = () => (select ? select.click() : open(picture));
  return make("li", {}, make("button", { title: prompt, onclick }, image, words,
    make("span", { class: "hint" }, facts)), favourite, ...(select ? [select] : []));
}
