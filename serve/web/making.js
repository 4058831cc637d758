// Makes pictures, one order at a time. Waiting orders outlive a reload.

import { askForAxes } from "./axes.js";
import { axisOfDeepCache, cellsOf, timeBoth, titlesOf } from "./comparison.js";
import { lose, model, needKey } from "./connection.js";
import { draw } from "./drawing.js";
import { byId, chip, download } from "./elements.js";
import { readForm, reportForm } from "./form.js";
import { addPicture, open } from "./gallery.js";
import { announce, dismiss, explain } from "./notices.js";
import { keepMapsOf, mapsIn } from "./maps.js";
import { leftWords, picturedIn, secondsWords } from "./parameters.js";
import { canEdit, editPicture, keepSource, source } from "./source.js";
import { sheetOf } from "./sheet.js";
import { joinTiles, offer, say, secondsLeft, setStage, tidyStage } from "./stage.js";
import { keepWork, keptWork } from "./store.js";

const REFRESH_MS = 200;
sessionStorage.tab ??= Math.random();
const WORK = `queue of ${sessionStorage.tab}`;

/** { settings, axes, isTimed }; the first is running. Without axes it is no comparison. */
let orders = [];
let running = null;

export const cancel = () => running?.abort();
export function cancelAll() {
  put(orders.slice(0, Number(running !== null)), false);
  cancel();
}
export const generate = () => reportForm() && order([]);
export const compareSides = () => reportForm() && order([axisOfDeepCache(readForm())], true);
export async function compareSettings() {
  const axes = reportForm() ? await askForAxes() : [];
  if (axes.length) order(axes);
}

function order(axes, isTimed = false) {
  const form = readForm();
  const settings = { ...form, source, maps: mapsIn(picturedIn(form)) };
  // Chosen now, so that a reload makes the same picture.
  settings.seed ||= String(crypto.getRandomValues(new Uint32Array(1))[0]);
  put([...orders, { settings, axes, isTimed }]);
}

export async function resume() {
  const kept = await keptWork(WORK).catch(() => null);
  if (!orders.length) put(kept ?? []);
}

function put(next, isGoingOn = true) {
  orders = next;
  keepWork(WORK, orders).catch(() => {});
  if (isGoingOn && !running && orders.length) begin(orders[0]);
  else showQueue();
}

async function begin(wanted) {
  const { settings, axes, isTimed } = wanted;
  const titles = axes.map(titlesOf);
  const draws = cellsOf(settings, axes);
  const sizes = draws.flatMap((each) => Array(each.n).fill(sizeIn(each)));
  const files = [];
  running = new AbortController();
  const tiles = setStage(sizes, ...titles);
  showStage();
  dismiss();
  showQueue();
  announce(tiles.length > 1 ? `Making ${tiles.length} pictures.` : "Making a picture.");
  const clock = setInterval(() => say(outlook(tiles, draws.length)), REFRESH_MS);
  let isGoingOn = true;
  try {
    let words = "";
    for (const each of draws) {
      const made = await draw(each, tiles.slice(files.length), running.signal, keep);
      files.push(...made.map(({ file }) => file));
    }
    clearInterval(clock);
    if (isTimed) {
      joinTiles(tiles, sizes[0]);
      for await (words of timeBoth(draws, running.signal)) say(words);
    }
    finish(words);
    if (axes.length && !isTimed) {
      offer("Download as one picture", async () =>
        download(await sheetOf(files, ...titles), "comparison.png"));
    }
  } catch (error) {
    isGoingOn = fail(error, tiles, () => put([wanted, ...orders]));
  }
  clearInterval(clock);
  running = null;
  put(orders.slice(1), isGoingOn);
}

function keep(picture, tile, settings) {
  const added = addPicture(picture);
  if (settings.source) keepSource(settings.source, picture.params);
  keepMapsOf(picturedIn(settings), settings.maps ?? {}, picture.params);
  tile.done(added, () => open(added), canEdit() ? () => editPicture(added) : null);
  announce(`${tile.name} is done in ${secondsWords(picture.seconds)}.`);
}

function finish(words) {
  say(words);
  if (words) announce(words);
}

/** On a phone it is below the visible part. */
function showStage() {
  const stage = byId("stage");
  if (stage.getBoundingClientRect().top > innerHeight / 2) stage.scrollIntoView();
}

/** May the waiting orders run? */
function fail(error, tiles, again) {
  const isCancelled = error.name === "AbortError";
  if (isCancelled) tidyStage();
  else for (const tile of tiles) tile.stop();
  finish(isCancelled ? "Cancelled." : "");
  if (isCancelled) return true;
  if (error.status === 401) needKey(again);
  else explain(error, again);
  if (error.status === 0 || error.status === 503) lose(error);
  return error.status === 400;
}

function outlook(tiles, draws) {
  for (const tile of tiles) tile.showProgress();
  if (draws > 1) return `${tiles.filter((tile) => tile.isDone).length} of ${draws} done`;
  const seconds = secondsLeft(tiles);
  return tiles.length === 1 || seconds === null ? "" : `all done in ${leftWords(seconds)}`;
}

function showQueue() {
  const isBusy = running !== null;
  const waiting = orders.slice(Number(isBusy));
  byId("generate").textContent = isBusy ? "Add to the queue" : "Generate";
  byId("cancel").hidden = !isBusy;
  byId("cancel-all").hidden = !waiting.length;
  byId("stage").ariaBusy = isBusy;
  byId("queue").replaceChildren(...waiting.map((each) => {
    const { settings: { prompt, n }, axes } = each;
    const remove = () => put(orders.filter((other) => other !== each), isBusy);
    const count = axes.length ? ", compared" : n > 1 ? ` × ${n}` : "";
    const item = chip(`${prompt}${count}\u00a0✕`, remove);
    item.firstChild.ariaLabel = `Remove from the queue: ${prompt}`;
    return item;
  }));
}

function sizeIn({ size, source: from }) {
  const side = model?.images.default_side ?? 1;
  if (size !== "auto") return size.split("x").map(Number);
  return from ? [from.width, from.height] : [side, side];
}
