// A chat with the language model; its answers can be drawn.

import { lose, model as painter, needKey } from "./connection.js";
import { byId, chip, make } from "./elements.js";
import { writeForm } from "./form.js";
import { generate } from "./making.js";
import { wordsOn } from "./prompt_hint.js";
import { chat, examine } from "./service.js";
import { showTab } from "./tabs.js";

const HELPED = ["a big ring", "two red things"];

let turns = [];
let model = null;
let running = null;

export function startChat() {
  byId("say").onsubmit = (event) => {
    event.preventDefault();
    say();
  };
  byId("words").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say();
  };
  byId("chat-stop").onclick = () => running?.abort();
  byId("chat-clear").onclick = clear;
}

/** The embedded model only expands prompts. */
const isHelper = () => model === "mini-llm";

/** Without a language model there is no chat. */
export function offerChat(id) {
  model = id ?? null;
  byId("tabs").hidden = model === null;
  byId("tab-chat").textContent = byId("chat-title").textContent = isHelper() ? "Prompt helper" : "Chat";
  byId("chat-hint").textContent = model ?? "";
  byId("words").placeholder = isHelper() ? "A few words; the answer is a whole scene" : "";
  byId("chat-examples").replaceChildren(...(isHelper() ? HELPED : []).map((text) => chip(text, () => {
    byId("words").value = text;
    say();
  })));
}

async function say() {
  const words = byId("words").value.trim();
  if (running || !words || model === null) return;
  turns.push({ role: "user", content: words });
  show("user", words);
  byId("words").value = "";
  const line = show("assistant", "");
  await answer(line);
  if (!isHelper()) return;
  const facts = await examine({ prompt: words, model: painter.id }).catch(() => ({}));
  line.append(make("span", { class: "hint" }, wordsOn(facts)));
}

async function answer(line) {
  running = new AbortController();
  showBusy(true);
  try {
    const text = await listen(line);
    turns.push({ role: "assistant", content: text });
    line.append(make("button", { class: "chip", onclick: () => drawThis(text) }, "Draw this"));
  } catch (error) {
    fail(error, line);
  } finally {
    running = null;
    showBusy(false);
  }
}

async function listen(line) {
  let text = "";
  for await (const { choices } of chat({ model, messages: turns }, running.signal)) {
    text += choices[0]?.delta.content ?? "";
    line.firstChild.textContent = text;
    line.scrollIntoView({ block: "nearest" });
  }
  return text;
}

function drawThis(prompt) {
  writeForm({ prompt, expand_prompt: false });
  showTab("pictures");
  generate();
}

function fail(error, line) {
  const isStopped = error.name === "AbortError";
  if (error.status === 401) return needKey(() => answer(line));
  turns.pop();
  line.dataset.state = "failed";
  line.firstChild.textContent = isStopped ? "Stopped." : error.message || "It could not answer.";
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
