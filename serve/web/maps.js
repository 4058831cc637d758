// The pictures of ControlNets and image prompts. They outlive a reload.

import { refuseFile } from "./notices.js";
import { picturedIn, picturedOf } from "./parameters.js";
import { preprocessed } from "./service.js";
import * as store from "./store.js";

const WORK = "maps";

let maps = {};
const shown = new Map();

/** Forgets what the settings do not name; waiting orders have their own. */
export async function startMaps(settings) {
  const kept = (await store.keptWork(WORK).catch(() => null)) ?? {};
  maps = { ...mapsIn(picturedIn(settings), kept), ...maps };
  store.keepWork(WORK, maps).catch(() => {});
}

export async function keepMap(file, key = `map-${Date.now()}-${Object.keys(maps).length}`) {
  try {
    (await createImageBitmap(file)).close();
  } catch {
    refuseFile(file.name);
    return null;
  }
  maps[key] = { file, url: await dataUrl(file) };
  await store.keepWork(WORK, maps).catch(() => {});
  return key;
}

export const mapsIn = (entries, among = maps) =>
  Object.fromEntries(entries.flatMap(({ image: key }) => among[key] ? [[key, among[key]]] : []));

export async function restoreMaps(entries) {
  const found = await Promise.all(entries.filter(({ image }) => image).map(async ({ image }) => {
    const file = maps[image]?.file ?? (await store.keptSource(image).catch(() => null));
    return Boolean(file) && Boolean(await keepMap(file, image));
  }));
  return found.every(Boolean);
}

export function keepMapsOf(entries, sent, params) {
  const made = picturedOf(params);
  for (const [place, { image }] of entries.entries()) {
    if (sent[image]) store.keepSource(made[place].image, sent[image].file).catch(() => {});
  }
}

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
