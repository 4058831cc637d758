// Pictures or chat: one is visible, the other keeps its state.

import { byId } from "./elements.js";

const NAMES = ["pictures", "chat"];

export function startTabs() {
  for (const name of NAMES) {
    byId(`tab-${name}`).onclick = () => showTab(name);
  }
  byId("tabs").onkeydown = (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = NAMES.find((name) => byId(name).hidden);
    showTab(other);
    byId(`tab-${other}`).focus();
  };
}

export function showTab(shown) {
  for (const name of NAMES) {
    const tab = byId(`tab-${name}`);
    tab.ariaSelected = name === shown;
    tab.tabIndex = name === shown ? 0 : -1;
    byId(name).hidden = name !== shown;
  }
}
