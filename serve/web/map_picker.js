// Picks ControlNets or IP-Adapters, each with a picture. The value is JSON of their fields, with a
// key in place of the picture.

import { make, remover, sliderAndNumber } from "./elements.js";
import { keepMap, shownMap } from "./maps.js";

const SHOWN = ["name", "image", "strength"];

export function makeMapPicker({ name, label, help, fields }, form, controlOf) {
  const usual = Object.fromEntries(fields.map((each) => [each.name, each.default ?? null]));
  const [strength, { label: shown }] = ["strength", "image"].map((one) => fields.find((each) => each.name === one));
  const value = make("input", { type: "hidden", name });
  const rows = make("ul", { class: "picked maps" });
  const choice = make("select", { id: `${name}-choice`, title: help });
  const file = make("input", { type: "file", accept: "image/*", hidden: true, onchange: useChosen });
  const add = make("button", { type: "button", class: "secondary" }, `Add ${shown.toLowerCase()}…`);
  const entries = () => [...rows.children].map(({ entry }) => entry);
  let names = [];
  add.onclick = () => file.click();

  async function useChosen() {
    await useMap(file.files[0]);
    file.value = "";
  }

  async function useMap(picture) {
    const image = await keepMap(picture);
    if (image) put([...entries(), { name: choice.value || names[0], image }]);
  }

  function put(next) {
    value.value = textOf(next);
    value.dispatchEvent(new Event("input", { bubbles: true }));
  }

  function rowOf(entry, place) {
    const change = (field, text) => {
      if (text === "" || text === usual[field]) delete entry[field];
      else entry[field] = text;
      put(entries());
      showMap();
    };
    const image = make("img", { alt: `The ${shown.toLowerCase()} of ${entry.name}` });
    const showMap = async () => { image.src = await shownMap({ ...usual, ...entry }); };
    const { minimum: min, maximum: max } = strength;
    const common = { min, max, value: entry.strength ?? strength.default };
    const inputs = sliderAndNumber(common, `${strength.label} of ${entry.name}`, (text) =>
      change("strength", Number(text)));
    const remove = remover(entry.name, () => {
      put(entries().filter((other) => other !== entry));
      add.focus();
    });
    const details = make("details", {}, make("summary", {}, "Details"), make("div", { class: "pair" },
      ...fields.filter((each) => !SHOWN.includes(each.name)).map((each) => {
        const id = `${name}-${place}-${each.name}`;
        const control = controlOf({ ...each, name: id, placeholder: each.default ?? "" });
        control.removeAttribute("name");
        control.required = false;
        if (each.choices && each.default === undefined) control.prepend(make("option", { value: "" }, "automatic"));
        control.value = entry[each.name] ?? each.default ?? "";
        control.onchange = () =>
          change(each.name, each.choices || control.value === "" ? control.value : Number(control.value));
        return make("div", { class: "field" }, make("label", { for: id }, each.label), control);
      })));
    showMap();
    const title = make("span", { class: "words", title: entry.name }, entry.name);
    const thumb = make("span", { class: "thumb" }, image);
    return Object.assign(make("li", {}, thumb, title, ...inputs, remove, details), { entry });
  }

  function show() {
    if (textOf(entries()) !== value.value) rows.replaceChildren(...JSON.parse(value.value || "[]").map(rowOf));
    if (names.join() !== [...choice.options].map((option) => option.value).join()) {
      choice.replaceChildren(...names.map((title) => make("option", { value: title }, title)));
    }
    add.disabled = !names.length;
    field.hidden = !names.length && !entries().length;
  }

  const field = make("div", { class: "field", id: `${name}-field` }, make("label", { for: choice.id }, label),
    rows, make("div", { class: "adder" }, choice, add), file, value);
  field.offer = (known) => {
    names = known;
    show();
  };
  field.useMap = useMap;
  form.addEventListener("input", show);
  return field;
}

const textOf = (entries) => (entries.length ? JSON.stringify(entries) : "");
