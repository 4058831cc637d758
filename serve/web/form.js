// The form: to settings and back. Its draft outlives a reload.

import { buildControls, showEditDefaults } from "./controls.js";
import { byId, make, openAround } from "./elements.js";
import { limitSize, offerSize, showSize, startSize } from "./size.js";
import { cacheWords, learn, usualSettings } from "./parameters.js";

const DRAFT = "settings";
const DEFAULTS = { prompt: "", n: 1, size: "auto", cache_interval: "", expand_prompt: false };
const NUMBERS = ["n", "cache_interval"];
const SPEEDS = { "": "Auto", 1: "Exact", 2: "Fast", 3: "Faster" };

const form = byId("ask");
let limits = null;
let source = null;

export function readForm() {
  const fields = Object.fromEntries(new FormData(form));
  return {
    ...Object.fromEntries(Object.keys(fields).map((name) => [name, valueIn(name, fields[name])])),
    expand_prompt: "expand_prompt" in fields,
  };
}

export function valueIn(name, text) {
  const isNumber = form.elements[name].type === "number" || NUMBERS.includes(name);
  return isNumber && text ? Number(text) : text.trim();
}

export function reportForm() {
  openAround(form.querySelector("details :invalid"));
  return form.reportValidity();
}

export function writeForm(settings) {
  for (const name of Object.keys(settings).filter((name) => form.elements[name])) {
    const radio = offer(name, String(settings[name]));
    const control = form.elements[name];
    // Chromium finds none by an empty value.
    if (radio) radio.checked = true;
    else if (control.type === "checkbox") control.checked = settings[name];
    else control.value = settings[name];
  }
  form.dispatchEvent(new Event("input"));
}

export const resetForm = () =>
  writeForm({ ...DEFAULTS, ...usualSettings(), prompt: form.elements.prompt.value });

export function startForm() {
  for (const place of form.querySelectorAll(".choice")) {
    for (const value of place.dataset.values.split(" ")) offer(place.dataset.name, value);
  }
  offerSize(DEFAULTS.size);
  startSize();
  // Typed before this program ran.
  const prompt = form.elements.prompt.value;
  form.addEventListener("input", changed);
  writeForm({ ...DEFAULTS, ...draft(), ...(prompt && { prompt }) });
}

export function offerModels(models) {
  const list = form.elements.model;
  list.replaceChildren(...models.map(({ id }) => make("option", {}, id)));
  list.disabled = list.closest(".field").hidden = models.length < 2;
}

/** With the model's name: the draft's may be gone. */
export function limitForm({ id, images, chat }) {
  limits = images;
  learn(images.parameters);
  buildControls(form, images);
  byId("source").hidden = !images.can_edit;
  limitSize(images);
  writeForm({ ...usualSettings(), ...draft(), model: id });
  const expand = form.elements.expand_prompt;
  expand.disabled = expand.closest("label").hidden = !chat;
  form.elements.steps.max = images.max_steps;
  form.elements.prompt.maxLength = images.max_prompt_chars;
  for (const radio of form.querySelectorAll("[name=n]")) {
    radio.closest("label").hidden = Number(radio.value) > images.max_n;
  }
  showSource(source);
}

export function showSource(next) {
  source = next;
  const mayEdit = Boolean(next) && Boolean(limits?.can_edit);
  const isMeant = {
    "edit-parameters": mayEdit,
    "edit-details": mayEdit,
    "mask-parameters": mayEdit && Boolean(next.mask),
  };
  for (const [id, isSo] of Object.entries(isMeant)) byId(id).hidden = byId(id).disabled = !isSo;
  byId("examples").hidden = mayEdit;
  const side = limits?.default_side;
  const automatic = form.elements.size.querySelector("[value=auto]");
  if (side) automatic.textContent = mayEdit ? "as the picture" : `${side} × ${side}`;
  changed();
}

export const draft = () => JSON.parse(localStorage.getItem(DRAFT) ?? "{}");

function changed() {
  const settings = readForm();
  localStorage.setItem(DRAFT, JSON.stringify({ ...draft(), ...settings }));
  for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  form.querySelector(".notice")?.remove();
  showSize();
  if (limits) showEditDefaults(form, limits.parameters, Boolean(source?.mask));
  byId("unusual").textContent = unusual(settings).join(", ");
  const interval = settings.cache_interval;
  byId("cache-hint").textContent =
    interval === 1
      ? "DeepCache is off: the whole network in every step."
      : `DeepCache: the whole network in ${cacheWords(interval)}, a small part of it in the others.`;
}

const unusual = (settings) =>
  [...byId("more").querySelectorAll("label")].filter(({ htmlFor: name, control }) => {
    const usual = { ...DEFAULTS, ...usualSettings() }[name];
    return control && !control.matches(":disabled") && usual !== undefined && settings[name] !== usual;
  }).map((label) => label.textContent);

function offer(name, value) {
  const list = form.elements[name];
  if (name === "size") return offerSize(value);
  const place = form.querySelector(`.choice[data-name=${name}]`);
  const radio = () => [...place.querySelectorAll("input")].find((input) => input.value === value);
  if (place && !radio()) {
    const input = make("input", { type: "radio", name, value });
    place.append(make("label", {}, input, make("span", {}, name === "n" ? value : SPEEDS[value] ?? value)));
  }
  if (list?.tagName === "SELECT" && ![...list.options].some((option) => option.value === value)) {
    list.append(make("option", { value }, value));
  }
  return place && radio();
}
