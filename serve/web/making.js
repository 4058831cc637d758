// Making pictures: one request at a time, or the two of a comparison, and its end: done, cancelled
// or failed.

import { compare, sidesOf, titlesOf } from "./comparison.js";
import { lose, model, needKey } from "./connection.js";
import { draw } from "./drawing.js";
import { byId } from "./elements.js";
import { readForm } from "./form.js";
import { addPicture, open } from "./gallery.js";
import { announce, dismiss, explain } from "./notices.js";
import { secondsWords } from "./parameters.js";
import { canEdit, editPicture, keepSource, source } from "./source.js";
import { say, secondsLeft, setStage } from "./stage.js";

const REFRESH_MS = 200;

/** Ends what is being made; null while nothing is. */
let running = null;

export const cancel = () => running?.abort();

export function generate() {
  const settings = asked();
  const act = async (tiles, signal) => {
    await draw(settings, tiles, signal, keep);
    return "";
  };
  begin(settings, settings.n, [], act, generate);
}

export function compareSides() {
  const sides = sidesOf(asked());
  const act = (tiles, signal) => compare(sides, tiles, signal, keep);
  begin(sides[0], sides.length, titlesOf(sides), act, compareSides);
}

const asked = () => ({ ...readForm(), source });

async function begin(settings, count, titles, act, again) {
  if (running || !byId("ask").reportValidity()) return;
  running = new AbortController();
  const tiles = setStage(count, sidesIn(settings), titles);
  showStage();
  dismiss();
  showBusy(true);
  announce(count > 1 ? `Making ${count} pictures.` : "Making a picture.");
  const clock = setInterval(() => say(outlook(tiles)), REFRESH_MS);
  try {
    finish(await act(tiles, running.signal));
  } catch (error) {
    fail(error, tiles, again);
  } finally {
    clearInterval(clock);
    running = null;
    showBusy(false);
  }
}

function keep(picture, tile, from) {
  const added = addPicture(picture);
  if (from) keepSource(from, picture.params);
  tile.done(added, () => open(added), canEdit() ? () => editPicture(added) : null);
  announce(`${tile.name} is done in ${secondsWords(picture.seconds)}.`);
}

function finish(words) {
  say(words);
  if (words) announce(words);
}

/** On a phone it begins below what one sees while asking. */
function showStage() {
  const stage = byId("stage");
  if (stage.getBoundingClientRect().top > innerHeight / 2) stage.scrollIntoView();
}

function fail(error, tiles, again) {
  const isCancelled = error.name === "AbortError";
  for (const tile of tiles) tile.stop(isCancelled ? "cancelled" : "not made");
  if (isCancelled) return finish("Cancelled.");
  say("");
  if (error.status === 401) return needKey(again);
  explain(error, again);
  if (error.status === 0 || error.status === 503) lose(error);
}

/** One tile says it by itself. */
function outlook(tiles) {
  const seconds = secondsLeft(tiles);
  return tiles.length === 1 || seconds === null ? "" : `all done in ${secondsWords(seconds)}`;
}

function showBusy(isBusy) {
  byId("generate").setAttribute("aria-disabled", isBusy);
  byId("generate").textContent = isBusy ? "Generating…" : "Generate";
  byId("compare").hidden = isBusy;
  byId("cancel").hidden = !isBusy;
  byId("stage").setAttribute("aria-busy", isBusy);
}

function sidesIn({ size, source: from }) {
  const side = model?.images.default_side ?? 1;
  if (size !== "auto") return size.split("x").map(Number);
  return from ? [from.width, from.height] : [side, side];
}
