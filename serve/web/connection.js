// Whether the service is there, which model it has, whether it wants a key.

import { byId } from "./elements.js";
import { askForKey, forgetKey, storedKey } from "./key.js";
import { notify } from "./notices.js";
import { describe, ready } from "./service.js";

const RETRY_MS = 2000;
const LOOK_MS = 10_000;

/** From GET /v1/models; undefined until it is known. */
export let model;
let isWaiting = false;
let hear;

/** `onModel` hears of the model, whenever it is found. */
export function startConnection(onModel) {
  hear = onModel;
  byId("key").onclick = changeKey;
  setInterval(look, LOOK_MS);
  return connect();
}

/** Somebody found that the service does not answer. */
export function lose(error) {
  show(error.status === 503 ? "not ready" : "no answer", "gone");
  if (!isWaiting) setTimeout(wait, RETRY_MS);
  isWaiting = true;
}

/** Ask for a key, and with one do what needed it. */
export async function needKey(then) {
  show("needs a key", "locked");
  if (await askForKey()) await connect(then);
  else notify("Nothing can be made without a key.", { action: ["Enter a key", () => needKey(then)] });
}

async function connect(then = () => {}) {
  try {
    model = await describe();
  } catch (error) {
    return error.status === 401 ? needKey(then) : lose(error);
  }
  show(model.id, "ready");
  hear(model);
  return then();
}

async function wait() {
  isWaiting = !(await ready().catch(() => false));
  if (isWaiting) setTimeout(wait, RETRY_MS);
  else connect();
}

/** It may go while nobody asks anything of it. */
async function look() {
  if (isWaiting || document.hidden || !model) return;
  await ready().catch(lose);
}

async function changeKey() {
  forgetKey();
  await needKey(() => {});
}

function show(text, state) {
  byId("service").textContent = text;
  byId("service").dataset.state = state;
  byId("key").hidden = storedKey() === null && state !== "locked";
  // Its documentation is behind the key too, and a link cannot show one.
  byId("docs").hidden = !byId("key").hidden;
}
