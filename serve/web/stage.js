// The stage: a tile for each picture being made, from noise through previews to the picture.

import { byId, make } from "./elements.js";
import { writeForm } from "./form.js";
import { announce } from "./notices.js";
import { leftWords, secondsWords } from "./parameters.js";
import { makeWipe } from "./wipe.js";

const stage = byId("stage");
const empty = stage.firstElementChild;

export function setStage(count, [width, height], titles = []) {
  const tiles = Array.from({ length: count }, (_, i) => new PictureTile(i, count, width / height, titles[i]));
  const grid = make("div", { class: "tiles", "data-count": count });
  grid.style.setProperty("--ratio", width / height);
  grid.append(...tiles.map((tile) => tile.element));
  stage.replaceChildren(grid, make("p", { class: "line", id: "line" }));
  return tiles;
}

/** Only finished pictures stay, or else the first words. */
export function tidyStage() {
  const grid = stage.firstChild;
  for (const tile of grid.querySelectorAll(".tile:not([data-state=done])")) tile.remove();
  grid.dataset.count = grid.children.length;
  if (!grid.children.length) grid.replaceWith(empty);
}

export function joinTiles([before, after], size) {
  const [left, right] = [before, after].map((tile) => tile.image.src);
  stage.firstChild.replaceWith(makeWipe(left, right, size, [before.name, after.name]));
}

export function say(text) {
  byId("line").textContent = text;
}

class PictureTile {
  constructor(index, count, ratio, title) {
    this.name = title ?? (count > 1 ? `Picture ${index + 1} of ${count}` : "The picture");
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
    if (onEdit) {
      const label = `Edit this: ${picture.params.prompt}`;
      this.caption.append(
        make("button", { class: "chip", "aria-label": label, onclick: onEdit }, "Edit this"));
    }
    this.state = "done";
  }

  stop(words) {
    if (this.element.dataset.state === "done") return;
    delete this.etaAtMs;
    this.bar.remove();
    this.words.textContent = words;
    this.state = "stopped";
  }
}

export function secondsLeft(tiles) {
  const ends = tiles.map((tile) => tile.etaAtMs).filter((at) => at !== undefined);
  return ends.length ? Math.max(0, Math.max(...ends) - performance.now()) / 1000 : null;
}
