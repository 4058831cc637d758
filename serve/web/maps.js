// The pictures of ControlNets and image prompts. They outlive a reload.

import { notify } from "./notices.js";
import { picturedOf } from "./parameters.js";
import { preprocessed } from "./service.js";
import * as store from "./store.js";

const WORK = "maps";

/** { file, url: a data URL } by key. */
let maps = {};
const shown = new Map();

export async function startMaps() {
  maps = { ...(await store.keptWork(WORK).catch(() => null)), ...maps };
}

export const mapOf = (key) => maps[key];

/** Resolves to its key, or to null if it is no picture. */
export async function keepMap(file, key = `map-${Date.now()}-${Object.keys(maps).length}`) {
  try {
    (await createImageBitmap(file)).close();
  } catch {
    notify(`${file.name} is not a picture that this browser can read. Needed: a PNG, JPEG or WebP file.`, {
      kind: "error",
    });
    return null;
  }
  maps[key] = { file, url: await dataUrl(file) };
  await store.keepWork(WORK, maps).catch(() => {});
  return key;
}

/** Forgets all but these. */
export function keepOnly(keys) {
  maps = Object.fromEntries(Object.entries(maps).filter(([key]) => keys.includes(key)));
  store.keepWork(WORK, maps).catch(() => {});
}

/** The maps that entries name. */
export const mapsIn = (entries) =>
  Object.fromEntries(entries.filter(({ image }) => maps[image]).map(({ image }) => [image, maps[image]]));

/** Restores maps of a picture that this browser made. Is none missing? */
export async function restoreMaps(entries) {
  const found = await Promise.all(entries.filter(({ image }) => image).map(async ({ image }) => {
    const file = maps[image]?.file ?? (await store.keptSource(image).catch(() => null));
    return Boolean(file) && Boolean(await keepMap(file, image));
  }));
  return found.every(Boolean);
}

/** Keeps the maps of a picture by their digests in its metadata. */
export function keepMapsOf(entries, sent, params) {
  const made = picturedOf(params);
  for (const [place, { image }] of entries.entries()) {
    if (sent[image]) store.keepSource(made[place].image, sent[image].file).catch(() => {});
  }
}

/** The URL of a map as the net sees it. */
export async function shownMap({ image, preprocess = "none", low, high }) {
  const url = maps[image]?.url ?? "";
  if (!url || preprocess === "none") return url;
  const key = [image, preprocess, low, high].join();
  if (!shown.has(key)) shown.set(key, await preprocessed(url, preprocess, low, high).catch(() => url));
  return shown.get(key);
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});
