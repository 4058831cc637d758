// The page: what its parts are, and what its buttons and keys do.

import { offerChat, startChat } from "./chat.js";
import { model, startConnection } from "./connection.js";
import { byId, make } from "./elements.js";
import { limitForm, resetForm, showSource, startForm, writeForm } from "./form.js";
import { startGallery } from "./gallery.js";
import { cancel, compareSides, generate, resume } from "./making.js";
import { examplesFor, surprise, unknownWords } from "./prompts.js";
import { restore, startRestoring } from "./restoring.js";
import { startSource } from "./source.js";
import { showTab, startTabs } from "./tabs.js";
import { startViewer } from "./viewer.js";

const THEMES = { auto: "light", light: "dark", dark: "auto" };

const ask = byId("ask");

startForm();
startViewer((picture) => restore(picture.params, "the picture", model?.id));
startRestoring(() => model?.id);
startSource(showSource);
startGallery();
startChat((prompt) => {
  writeForm({ prompt, expand_prompt: false });
  showTab("pictures");
  showUnknownWords();
  generate();
});
startTabs();
startButtons();
startKeys();
startTheme();
startConnection((found) => {
  limitForm(found);
  offerChat(found.chat);
  showExamples();
  showUnknownWords();
  resume();
});

function startButtons() {
  ask.addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  ask.elements.prompt.addEventListener("input", showUnknownWords);
  byId("compare").addEventListener("click", compareSides);
  byId("cancel").addEventListener("click", () => {
    cancel();
    byId("generate").focus();
  });
  byId("reset").addEventListener("click", resetForm);
}

function startKeys() {
  addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]") || byId("pictures").hidden) return;
    const hasControl = event.ctrlKey || event.metaKey;
    const act = {
      Enter: hasControl && (event.shiftKey ? compareSides : generate),
      Escape: cancel,
      k: hasControl && (() => ask.elements.prompt.select()),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function startTheme() {
  const root = document.documentElement.dataset;
  const show = () => {
    byId("theme").textContent = { auto: "◐", light: "○", dark: "●" }[root.theme];
    byId("theme").ariaLabel = byId("theme").title = `Theme: ${root.theme}`;
  };
  byId("theme").addEventListener("click", () => {
    root.theme = THEMES[root.theme];
    localStorage.setItem("theme", root.theme);
    show();
  });
  show();
}

function showExamples() {
  const use = (prompt) => {
    writeForm({ prompt });
    showUnknownWords();
  };
  const chip = (text, act) =>
    make("li", {}, make("button", { type: "button", class: "chip", onclick: act }, text));
  const chips = examplesFor(model.id).map((prompt) => chip(prompt, () => use(prompt)));
  if (surprise(model.id)) chips.push(chip("Surprise me", () => use(surprise(model.id))));
  byId("examples").replaceChildren(...chips);
}

function showUnknownWords() {
  const unknown = unknownWords(ask.elements.prompt.value, model?.id ?? "");
  byId("prompt-hint").textContent = unknown.length
    ? `This small model never saw “${unknown.slice(0, 3).join("”, “")}”. It knows six shapes and ` +
      "eight colours."
    : "";
}
