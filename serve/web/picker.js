// Picks entries of a list that the service knows by name, such as LoRAs, each with its weight. The
// value is their text, as in a:0.8,b:1.

import { make, remover, sliderAndNumber } from "./elements.js";

export function makePicker({ name, label, help, fields }, form) {
  const [, weight] = fields;
  const value = make("input", { type: "hidden", name });
  const rows = make("ul", { class: "picked" });
  const choice = make("select", { id: `${name}-choice`, title: help });
  const add = make("button", { type: "button", class: "secondary", onclick: addChosen }, "Add");
  const entries = () => [...rows.children].map(({ entry }) => entry);
  const read = () => value.value.split(",").filter(Boolean).map((text) => text.split(":"));
  let names = [], words = [];

  function addChosen() {
    if (words.includes(choice.value)) return addWord(choice.value);
    put([...entries(), [choice.value, weight.default]]);
    rows.lastChild.querySelector("[type=number]").select();
  }

  function addWord(word) {
    const { prompt } = form.elements;
    prompt.value = [prompt.value, word].filter(Boolean).join(", ");
    choice.value = "";
    prompt.dispatchEvent(new Event("input", { bubbles: true }));
    prompt.focus();
  }

  function put(next) {
    value.value = textOf(next);
    value.dispatchEvent(new Event("input", { bubbles: true }));
  }

  function rowOf(entry) {
    const [title, strength = weight.default, ...others] = entry;
    const common = { min: weight.minimum, max: weight.maximum, value: strength };
    const inputs = sliderAndNumber(common, `${weight.label} of ${title}`, (text) => {
      entry[1] = text || weight.default;
      value.value = textOf(entries());
    });
    const remove = remover(title, () => {
      put(entries().filter((other) => other !== entry));
      (rows.querySelector("button") ?? choice).focus();
    });
    const more = others.length ? ` (${fields[2].label.toLowerCase()} ${others[0]})` : "";
    const words = make("span", { class: "words", title }, title + more);
    return Object.assign(make("li", {}, words, ...inputs, remove), { entry });
  }

  function show() {
    if (textOf(entries()) !== textOf(read())) rows.replaceChildren(...read().map(rowOf));
    const used = entries().map(([title]) => title);
    const left = ["", ...names.filter((title) => !used.includes(title))];
    const all = [...left, ...words];
    const option = (title) => make("option", { value: title }, title || "choose one…");
    if (all.join() !== [...choice.options].map(({ value: title }) => title).join()) {
      choice.replaceChildren(...left.map(option));
      if (words.length) {
        choice.append(make("optgroup", { label: "Embeddings" }, ...words.map(option)));
      }
    }
    choice.disabled = all.length === 1;
    add.disabled = !choice.value;
    field.hidden = !names.length && !words.length && !used.length;
  }

  const field = make("div", { class: "field" },
    make("label", { for: choice.id }, label), rows, make("div", { class: "adder" }, choice, add), value);
  field.offer = (known, embeddings = []) => {
    names = known;
    words = embeddings;
    show();
  };
  form.addEventListener("input", show);
  return field;
}

const textOf = (entries) => entries.map((entry) => entry.join(":")).join(",");
