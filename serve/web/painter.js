// Paints a mask over the picture: by mouse, pen, finger or keys.

import { byId } from "./elements.js";
import { PaintedMask } from "./mask.js";

const painter = byId("painter");
const canvas = byId("painter-canvas");
const brush = byId("brush");
const size = byId("brush-size");

export const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const ACTIONS = {
  undo: () => mask.undo(),
  redo: () => mask.redo(),
  clear: () => mask.act({ kind: "clear" }),
  invert: () => mask.act({ kind: "invert" }),
};
const KEYS = {
  b: () => { byId("tool-brush").checked = true; },
  e: () => { byId("tool-eraser").checked = true; },
  i: ACTIONS.invert,
  y: ACTIONS.redo,
  z: ({ shiftKey }) => (shiftKey ? ACTIONS.redo() : ACTIONS.undo()),
  "[": () => size.stepDown(),
  "]": () => size.stepUp(),
};

let mask;
let at = [0, 0];
let isDown = false;

export function startPainter() {
  canvas.onpointerdown = (event) => {
    if (!event.isPrimary || event.button) return;
    canvas.setPointerCapture(event.pointerId);
    moveTo(pointOf(event));
    press();
  };
  canvas.onpointermove = (event) => {
    if (!event.isPrimary) return;
    for (const each of [...(event.getCoalescedEvents?.() ?? []), event]) moveTo(pointOf(each));
  };
  for (const end of ["pointerup", "pointercancel", "blur"]) canvas.addEventListener(end, lift);
  painter.onkeydown = (event) => { if (isPainting()) onKey(event); };
  canvas.onkeyup = ({ key }) => { if (key === " ") lift(); };
  size.oninput = showBrush;
  for (const button of painter.querySelectorAll("[data-act]")) {
    button.onclick = () => act(ACTIONS[button.dataset.act]);
  }
  byId("painter-leave").onclick = () => painter.close();
}

export async function openPainter({ file, mask: before, width, height }, url, onMask) {
  const image = await createImageBitmap(before ?? file);
  Object.assign(canvas, { width, height });
  mask = new PaintedMask(canvas, image);
  at = [width / 2, height / 2];
  isDown = false;
  const made = () => (mask.share > 0 ? mask.toFile() : null);
  show("paint", "Paint the part to redraw", url, width / height, made, onMask);
  canvas.focus();
  showBrush();
  tell();
}

const isPainting = () => painter.dataset.mode === "paint";

export function show(mode, title, url, ratio, made, then) {
  painter.dataset.mode = mode;
  byId("painter-title").textContent = title;
  byId("painter-image").src = url;
  byId("easel").style.setProperty("--ratio", ratio);
  byId("painter-use").onclick = async () => {
    const result = await made();
    painter.close();
    then(result);
  };
  painter.showModal();
}

function pointOf({ clientX, clientY }) {
  const { left, top, width, height } = canvas.getBoundingClientRect();
  return [(clientX - left) / width * canvas.width, (clientY - top) / height * canvas.height];
}

const widthOfBrush = () => Math.min(canvas.width, canvas.height) * size.value / 100;

function moveTo([x, y]) {
  at = [clamp(x, canvas.width), clamp(y, canvas.height)];
  if (isDown) mask.extend(at);
  showBrush();
}

const clamp = (value, most) => Math.min(Math.max(value, 0), most);

function press() {
  if (isDown) return;
  isDown = true;
  const isEraser = byId("tool-eraser").checked;
  mask.act({ kind: "stroke", isEraser, size: widthOfBrush(), points: [at] });
  tell();
}

function lift() {
  if (!isDown) return;
  isDown = false;
  // As undo draws it: pieces of a stroke overlap at their edges.
  mask.redraw();
  tell();
}

function onKey(event) {
  const { key, target } = event;
  const isOnCanvas = target === canvas;
  if (isOnCanvas && MOVES[key]) {
    const step = widthOfBrush() / (event.shiftKey ? 1 : 4);
    moveTo(at.map((value, i) => value + MOVES[key][i] * step));
  } else if (isOnCanvas && key === " ") press();
  else if (isOnCanvas && key === "Enter") (isDown ? lift : press)();
  else if (KEYS[key.toLowerCase()] && !event.altKey) act(() => KEYS[key.toLowerCase()](event));
  else return;
  event.preventDefault();
}

function act(does) {
  lift();
  does();
  showBrush();
  tell();
}

function showBrush() {
  const [x, y] = at;
  brush.style.left = `${x / canvas.width * 100}%`;
  brush.style.top = `${y / canvas.height * 100}%`;
  brush.style.width = `${widthOfBrush() / canvas.width * 100}%`;
}

function tell() {
  brush.dataset.state = isDown ? "down" : "up";
  painter.querySelector("[data-act=undo]").disabled = !mask.done.length;
  painter.querySelector("[data-act=redo]").disabled = !mask.undone.length;
  if (isDown) byId("painter-says").textContent = "painting";
  else byId("painter-says").textContent = `${(mask.share * 100).toFixed(0)}% will be redrawn`;
}
