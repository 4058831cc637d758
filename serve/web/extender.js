// A larger canvas around the picture: drag each side of the frame, or use arrow keys.

import { byId, make } from "./elements.js";
import { MOVES, show } from "./painter.js";

const OUTWARDS = { left: [-1, 0], right: [1, 0], top: [0, -1], bottom: [0, 1] };
const STEP = 8;

const handles = Object.keys(OUTWARDS).map((side) =>
  make("span", { role: "slider", tabindex: 0, "data-side": side, "aria-label": side }));

let from;
let added;

export function startExtender() {
  handles.forEach(startHandle);
  byId("frame").append(...handles);
}

function startHandle(handle) {
  const { side } = handle.dataset;
  const along = (x, y) => x * OUTWARDS[side][0] + y * OUTWARDS[side][1];
  // The frame shows twice the picture.
  const pixelsAlong = ({ clientX, clientY }) =>
    along(clientX, clientY) * 2 * from.width / byId("easel").clientWidth;
  let start;
  handle.onpointerdown = (event) => {
    handle.setPointerCapture(event.pointerId);
    start = added[side] - pixelsAlong(event);
  };
  handle.onpointermove = (event) => {
    if (handle.hasPointerCapture(event.pointerId)) set(handle, start + pixelsAlong(event));
  };
  handle.onkeydown = (event) => {
    if (!MOVES[event.key]) return;
    event.preventDefault();
    set(handle, added[side] + along(...MOVES[event.key]) * STEP);
  };
}

export function openExtender(picture, url, then) {
  from = picture;
  added = {};
  for (const handle of handles) set(handle, 0);
  const ratio = from.width / from.height;
  show("extend", "Drag the frame to where the picture is to end", url, ratio, extended, then);
  handles[0].focus();
}

function set(handle, pixels) {
  const { side } = handle.dataset;
  const length = OUTWARDS[side][0] ? from.width : from.height;
  const most = Math.floor(length / 2 / STEP);
  added[side] = Math.min(Math.max(Math.round(pixels / STEP), 0), most) * STEP;
  byId("frame").style[side] = `${25 - added[side] / length * 50}%`;
  handle.ariaValueNow = added[side];
  handle.ariaValueMax = most * STEP;
  byId("painter-says").textContent = sizeNow().join(" × ");
}

const sizeNow = () =>
  [from.width + added.left + added.right, from.height + added.top + added.bottom];

async function extended() {
  const [width, height] = sizeNow();
  const draw = async (file) => {
    const canvas = new OffscreenCanvas(width, height);
    const context = canvas.getContext("2d");
    if (file) context.drawImage(await createImageBitmap(file), added.left, added.top);
    else context.fillRect(added.left, added.top, from.width, from.height);
    return canvas.convertToBlob();
  };
  return { ...from, width, height, file: await draw(from.file), mask: await draw(from.mask) };
}
