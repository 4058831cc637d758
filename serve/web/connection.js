// Does the service answer, which model has it, does it need a key.

import { byId } from "./elements.js";
import { draft } from "./form.js";
import { askForKey, forgetKey, storedKey } from "./key.js";
import { notify } from "./notices.js";
import { describe, ready } from "./service.js";

const RETRY_MS = 2000;
const LOOK_MS = 10_000;

export let model;
export let models = [];
let chat;
let isWaiting = false;
let hear;

export function startConnection(onModel) {
  hear = onModel;
  byId("key").onclick = () => {
    forgetKey();
    needKey();
  };
  setInterval(look, LOOK_MS);
  return connect();
}

export function lose(error) {
  show(error.status === 503 ? "not ready" : "no answer", "gone");
  if (!isWaiting) setTimeout(wait, RETRY_MS);
  isWaiting = true;
}

export async function needKey(then) {
  show("needs a key", "locked");
  if (await askForKey()) await connect(then);
  else notify("The service makes no pictures without a key.", { action: ["Enter a key", () => needKey(then)] });
}

async function connect(then = () => {}) {
  try {
    ({ models, chat } = await describe());
  } catch (error) {
    return error.status === 401 ? needKey(then) : lose(error);
  }
  await choose(model?.id ?? draft().model);
  return then();
}

/** The first, if none has this name. */
export async function choose(id) {
  model = models.find((each) => each.id === id) ?? models[0];
  await hear({ ...model, chat });
  show(model.id, "ready");
}

async function wait() {
  isWaiting = !(await ready().catch(() => false));
  if (isWaiting) setTimeout(wait, RETRY_MS);
  else connect();
}

async function look() {
  if (isWaiting || document.hidden || !model) return;
  await ready().catch(lose);
}

function show(text, state) {
  byId("service").textContent = text;
  byId("service").dataset.state = state;
  byId("key").hidden = storedKey() === null && state !== "locked";
  // The documentation needs the key too, and a link cannot send one.
  byId("docs").hidden = !byId("key").hidden;
}
