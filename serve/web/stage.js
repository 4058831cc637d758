// The stage: a tile for each picture being made, from noise through previews to the picture.

import { byId, make } from "./elements.js";
import { writeForm } from "./form.js";
import { announce } from "./notices.js";
import { FLAGGED, leftWords, secondsWords } from "./parameters.js";
import { makeWipe } from "./wipe.js";

const stage = byId("stage");
const empty = stage.firstElementChild;

/** `columns` and `rows` are titles; rows come only with columns. */
export function setStage(sizes, columns = [], rows = []) {
  const count = sizes.length;
  const titleOf = (i) =>
    [columns[i % columns.length], rows[Math.floor(i / columns.length)]].filter(Boolean).join(", ");
  const tiles = sizes.map(([width, height], i) => new PictureTile(i, count, width / height, titleOf(i)));
  const grid = make("div", { class: rows.length ? "tiles grid" : "tiles", "data-count": count });
  grid.style.setProperty("--ratio", sizes[0][0] / sizes[0][1]);
  grid.append(...tiles.map((tile) => tile.element));
  if (rows.length) {
    grid.style.setProperty("--across", columns.length);
    const titled = (tag, title) => make(tag, { "aria-hidden": true }, title);
    rows.forEach((title, i) => tiles[i * columns.length].element.before(titled("strong", title)));
    grid.prepend(...["", ...columns].map((title) => titled("b", title)));
  }
  stage.replaceChildren(grid, make("p", { class: "line", id: "line" }));
  return tiles;
}

/** Only finished pictures stay, or else the first words. */
export function tidyStage() {
  const grid = stage.firstChild;
  const left = grid.querySelectorAll(".tile:not([data-state=done])");
  // A grid keeps its gaps.
  for (const tile of left) grid.matches(".grid") ? tile.replaceWith(make("span")) : tile.remove();
  if (!grid.matches(".grid")) grid.dataset.count = grid.children.length;
  if (!grid.querySelector("img")) grid.replaceWith(empty);
}

export function joinTiles([before, after], size) {
  const [left, right] = [before, after].map((tile) => tile.image.src);
  stage.firstChild.replaceWith(makeWipe(left, right, size, [before.name, after.name]));
}

export function say(text) {
  byId("line").textContent = text;
}

export const offer = (title, onclick) => stage.append(make("button", { class: "quiet", onclick }, title));

class PictureTile {
  constructor(index, count, ratio, title) {
    this.name = title || (count > 1 ? `Picture ${index + 1} of ${count}` : "The picture");
    this.image = make("img", { alt: "", hidden: true });
    this.bar = make("progress", { max: 1, value: 0, "aria-label": this.name });
    this.frame = make("div", { class: "frame" }, this.image, this.bar);
    this.frame.style.aspectRatio = ratio;
    this.words = make("span", { class: "words" }, "waiting");
    this.caption = make("figcaption", {}, title ? make("strong", {}, title) : "", this.words);
    this.element =
      make("figure", { class: "tile", "data-state": "waiting" }, this.frame, this.caption);
  }

  set state(value) {
    this.element.dataset.state = value;
  }

  get isDone() {
    return this.element.dataset.state === "done";
  }

  progress({ step, steps, queue_position: position, eta_s: etaS }) {
    this.etaAtMs = performance.now() + etaS * 1000;
    this.steps = steps;
    this.bar.value = step / steps;
    this.place = position ? `number ${position} in the queue` : `step ${step} of ${steps}`;
    this.showProgress();
    if (!position) this.state = "forming";
  }

  showProgress() {
    if (this.etaAtMs === undefined) return;
    this.words.textContent = `${this.place}, ${leftWords((this.etaAtMs - performance.now()) / 1000)} left`;
  }

  /** Resolves when it is visible, so that previews show one by one. */
  preview({ b64_json: base64, step }) {
    const part = step / this.steps;
    this.image.hidden = false;
    // A preview has few pixels, so it is blurred, less with every step.
    this.frame.style.setProperty("--blur", `${5 - 2.5 * part}cqw`);
    this.image.src = `data:image/png;base64,${base64}`;
    return new Promise((resolve) => { this.image.onload = this.image.onerror = resolve; });
  }

  /** `onEdit` is null without edits. */
  done(picture, onOpen, onEdit) {
    delete this.etaAtMs;
    this.bar.remove();
    this.image.hidden = false;
    this.image.src = picture.url;
    this.image.alt = picture.params.prompt;
    const label = `Open: ${picture.params.prompt}`;
    const button = make("button", { class: "frame", "aria-label": label, onclick: onOpen }, this.image);
    button.style.aspectRatio = this.frame.style.aspectRatio;
    this.frame.replaceWith(button);
    const seconds = secondsWords(picture.seconds);
    const { seed } = picture.params;
    const use = () => {
      writeForm({ seed });
      announce(`The next one begins with seed ${seed}.`);
    };
    const chip = make("button", { class: "chip", title: "Use this seed", onclick: use }, `seed ${seed}`);
    this.words.replaceChildren(seconds, " ", chip);
    if (picture.isFlagged) this.caption.append(make("span", { class: "hint" }, FLAGGED));
    if (onEdit) {
      const label = `Edit this: ${picture.params.prompt}`;
      this.caption.append(
        make("button", { class: "chip", "aria-label": label, onclick: onEdit }, "Edit this"));
    }
    this.state = "done";
  }

  stop() {
    if (this.isDone) return;
    delete this.etaAtMs;
    this.bar.remove();
    this.words.textContent = "not made";
    this.state = "stopped";
  }
}

export function secondsLeft(tiles) {
  const ends = tiles.map((tile) => tile.etaAtMs).filter((at) => at !== undefined);
  return ends.length ? Math.max(0, Math.max(...ends) - performance.now()) / 1000 : null;
}
