// A conversation with the language model. What it answers can be drawn.

import { lose, needKey } from "./connection.js";
import { byId, make } from "./elements.js";
import { chat } from "./service.js";

const FAILED = "It could not answer.";

/** What was said so far, as the API takes it. */
let turns = [];
let model = null;
/** Ends the answer that is coming; null while none is. */
let running = null;

/** `onDraw` is handed a text to make a picture of. */
export function startChat(onDraw) {
  byId("say").addEventListener("submit", (event) => {
    event.preventDefault();
    say(onDraw);
  });
  byId("words").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say(onDraw);
  });
  byId("chat-stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", clear);
}

/** Without a language model there is no chat. */
export function offerChat(id) {
  model = id ?? null;
  byId("tabs").hidden = model === null;
  byId("chat-hint").textContent = model ?? "";
}

async function say(onDraw) {
  const words = byId("words").value.trim();
  if (running || !words || model === null) return;
  turns.push({ role: "user", content: words });
  show("user", words);
  byId("words").value = "";
  await answer(show("assistant", ""), onDraw);
}

async function answer(line, onDraw) {
  running = new AbortController();
  showBusy(true);
  try {
    const text = await listen(line);
    turns.push({ role: "assistant", content: text });
    line.append(make("button", { class: "chip", onclick: () => onDraw(text) }, "Draw this"));
  } catch (error) {
    fail(error, line, onDraw);
  } finally {
    running = null;
    showBusy(false);
  }
}

async function listen(line) {
  let text = "";
  const json = JSON.stringify({ model, messages: turns, stream: true });
  for await (const { choices } of chat(json, running.signal)) {
    text += choices[0]?.delta.content ?? "";
    line.firstChild.textContent = text;
    line.scrollIntoView({ block: "nearest" });
  }
  return text;
}

function fail(error, line, onDraw) {
  const isStopped = error.name === "AbortError";
  if (error.status === 401) return needKey(() => answer(line, onDraw));
  turns.pop();
  line.dataset.state = "failed";
  line.firstChild.textContent = isStopped ? "Stopped." : error.message || FAILED;
  if (error.status === 0) lose(error);
}

function show(role, text) {
  const line = make("li", { class: "turn", "data-role": role }, make("p", {}, text));
  byId("turns").append(line);
  line.scrollIntoView({ block: "nearest" });
  return line;
}

function clear() {
  running?.abort();
  turns = [];
  byId("turns").replaceChildren();
  showBusy(false);
}

function showBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("chat-stop").hidden = !isBusy;
  byId("chat-clear").hidden = !turns.length;
  byId("turns").ariaBusy = isBusy;
}
