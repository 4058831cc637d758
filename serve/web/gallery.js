// The gallery: every picture made in this browser, the newest first.

import { ask, byId, make } from "./elements.js";
import { notify } from "./notices.js";
import { picturedOf, secondsWords } from "./parameters.js";
import * as store from "./store.js";
import { openViewer } from "./viewer.js";

const PAGE = 48;

let pictures = [];
let shown = PAGE;

export async function startGallery() {
  byId("older").onclick = () => {
    shown += PAGE;
    render();
  };
  byId("clear").onclick = clear;
  try {
    pictures = (await store.kept()).reverse().map(withUrl);
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
  store.keep(picture).then(
    (id) => { added.id = id; },
    () => notify("There is no room for more pictures in this browser. Remove some."),
  );
  return added;
}

export const open = (picture) => openViewer(picture, { neighbour, remove });

const sourcesOf = ({ params }) =>
  [params.image_sha256, params.mask_sha256, ...picturedOf(params).map(({ image }) => image)];

const withUrl = (picture) => ({ ...picture, url: URL.createObjectURL(picture.file) });

/** 1: the next older; -1: the next newer. */
const neighbour = (picture, step) => pictures[pictures.indexOf(picture) + step];

async function remove(picture) {
  pictures = pictures.filter((each) => each !== picture);
  render();
  if (picture.id !== undefined) await store.remove(picture.id);
  notify("One picture was removed.", { action: ["Undo", () => addPicture(picture)] });
}

async function clear() {
  if ((await ask(byId("confirm-dialog"))) !== "yes") return;
  pictures = [];
  render();
  await store.removeAll();
}

function render() {
  byId("thumbs").replaceChildren(...pictures.slice(0, shown).map(thumb));
  byId("older").hidden = pictures.length <= shown;
  byId("clear").hidden = pictures.length === 0;
  byId("gallery-note").textContent = pictures.length
    ? `${pictures.length} kept in this browser only`
    : "Your pictures are kept in this browser only.";
}

function thumb(picture) {
  const { prompt, cache_interval: interval } = picture.params;
  const image = make("img", { src: picture.url, alt: "", loading: "lazy" });
  const facts = `${secondsWords(picture.seconds)}, DeepCache ${interval > 1 ? interval : "off"}`;
  const words = make("span", { class: "words" }, prompt);
  return make("li", {}, make("button", { title: prompt, onclick: () => open(picture) }, image, words,
    make("span", { class: "hint" }, facts)));
}
