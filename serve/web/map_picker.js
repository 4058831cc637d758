// Picks ControlNets or IP-Adapters, each with a picture. The value is JSON of their fields, with a
// key in place of the picture.

import { make, remover, sliderAndNumber } from "./elements.js";
import { keepMap, mapOf, shownMap } from "./maps.js";

const SHOWN = ["name", "image", "strength"];

export function makeMapPicker({ name, label, help, fields }, form, controlOf) {
  const usual = Object.fromEntries(fields.map((each) => [each.name, each.default ?? null]));
  const [strength, { label: shown }] = ["strength", "image"].map((one) => fields.find((each) => each.name === one));
  const value = make("input", { type: "hidden", name });
  const rows = make("ul", { class: "picked maps" });
  const choice = make("select", { id: `${name}-choice`, title: help });
  const file = make("input", { type: "file", accept: "image/*", hidden: true, onchange: useChosen });
  const add = make("button", { type: "button", class: "secondary" }, `Add ${shown.toLowerCase()}…`);
  const entries = () => JSON.parse(value.value || "[]");
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
    value.value = next.length ? JSON.stringify(next) : "";
    value.dispatchEvent(new Event("input", { bubbles: true }));
  }

  function rowOf(entry, place) {
    const change = (field, text) => {
      const next = entries();
      if (text === "" || text === null || text === usual[field]) delete next[place][field];
      else next[place][field] = text;
      value.value = JSON.stringify(next);
      value.dispatchEvent(new Event("input", { bubbles: true }));
      showMap(next[place]);
    };
    const image = make("img", { alt: `The ${shown.toLowerCase()} of ${entry.name}` });
    const showMap = async (next) => { image.src = await shownMap({ ...usual, ...next }); };
    const { minimum: min, maximum: max } = strength;
    const common = { min, max, value: entry.strength ?? strength.default };
    const inputs = sliderAndNumber(common, `${strength.label} of ${entry.name}`, (text) =>
      change("strength", Number(text)));
    const remove = remover(entry.name, () => {
      put(entries().filter((_, other) => other !== place));
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
    showMap(entry);
    const title = make("span", { class: "words", title: entry.name }, entry.name);
    return make("li", {}, make("span", { class: "thumb" }, image), title, ...inputs, remove, details);
  }

  let drawn;
  function show() {
    const shape = JSON.stringify(entries().map(({ name: net, image }) => [net, image, mapOf(image) !== undefined]));
    if (shape !== drawn) rows.replaceChildren(...entries().map(rowOf));
    drawn = shape;
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
