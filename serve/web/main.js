// The page: its parts, buttons and keys.

import { offerAxes } from "./axes.js";
import { offerChat, startChat } from "./chat.js";
import { choose, model, models, startConnection } from "./connection.js";
import { byId } from "./elements.js";
import { offerExamples } from "./examples.js";
import { draft, limitForm, offerModels, resetForm, startForm } from "./form.js";
import { startGallery } from "./gallery.js";
import { startMaps } from "./maps.js";
import { cancel, cancelAll, compareSettings, compareSides, generate, resume } from "./making.js";
import { hint } from "./prompt_hint.js";
import { startRestoring } from "./restoring.js";
import { startSource } from "./source.js";
import { startTabs } from "./tabs.js";
import { startViewer } from "./viewer.js";

const THEMES = { auto: "light", light: "dark", dark: "auto" };

const ask = byId("ask");

startForm();
startViewer();
startRestoring();
startSource();
const mapsAreHere = startMaps(draft());
startGallery();
startChat();
startTabs();
startButtons();
startKeys();
startTheme();
startConnection(async (found) => {
  offerChat(found.chat);
  await mapsAreHere;
  offerModels(models);
  limitForm(found);
  offerAxes(found.images.parameters);
  offerExamples(found.id);
  resume();
});

function startButtons() {
  ask.onsubmit = (event) => {
    event.preventDefault();
    generate();
  };
  ask.addEventListener("input", hint);
  ask.addEventListener("input", () => {
    const { value } = ask.elements.model;
    if (models.length > 1 && value !== model.id) choose(value);
  });
  byId("compare").onclick = compareSides;
  byId("compare-settings").onclick = compareSettings;
  for (const [id, act] of [["cancel", cancel], ["cancel-all", cancelAll]]) {
    byId(id).onclick = () => {
      act();
      byId("generate").focus();
    };
  }
  byId("reset").onclick = resetForm;
}

function startKeys() {
  addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]") || byId("pictures").hidden) return;
    const hasControl = event.ctrlKey || event.metaKey;
    const act = {
      Enter: hasControl && (event.shiftKey ? compareSides : generate),
      Escape: event.shiftKey ? cancelAll : cancel,
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
  byId("theme").onclick = () => {
    root.theme = THEMES[root.theme];
    localStorage.setItem("theme", root.theme);
    show();
  };
  show();
}
