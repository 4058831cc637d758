// Enlarges a picture: by buttons and keys, moved by dragging or scrolling.

import { byId } from "./elements.js";

const LEVELS = [0.25, 0.5, 1, 2, 4, 8];

const place = byId("view");
const image = byId("viewer-image");
let scale = null;

export function startZoom() {
  for (const button of byId("zoom").querySelectorAll("button")) {
    button.onclick = () => zoom(button.dataset.zoom);
  }
  image.ondblclick = () => setScale(scale ? null : 1);
  place.onpointermove = ({ buttons, pointerType, movementX, movementY }) => {
    // A finger scrolls by itself.
    if (buttons === 1 && scale && pointerType === "mouse") place.scrollBy(-movementX, -movementY);
  };
  image.draggable = false;
}

export const isZoomed = () => scale !== null;

export function zoom(how) {
  const now = scale ?? image.clientWidth / image.naturalWidth;
  if (how === "0") setScale(null);
  if (how === "+") setScale(LEVELS.find((level) => level > now * 1.01) ?? LEVELS.at(-1));
  if (how === "-") setScale(LEVELS.findLast((level) => level < now * 0.99) ?? LEVELS[0]);
}

export function setScale(next) {
  scale = next;
  place.dataset.zoomed = isZoomed();
  image.style.width = scale ? `${image.naturalWidth * scale}px` : "";
  byId("zoom-says").textContent = scale ? `${scale * 100}%` : "fitted";
}
