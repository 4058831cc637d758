// Picks entries of a list that the service knows by name, such as LoRAs, each with its weight. The
// value is their text, as in a:0.8,b:1.

import { make } from "./elements.js";

const STEP = 0.05;

/** `fields` are those of an entry: its name, its weight, and others that only texts set. */
export function makePicker({ name, label, help, fields }, form) {
  const [, weight] = fields;
  const value = make("input", { type: "hidden", name });
  const rows = make("ul", { class: "picked" });
  const choice = make("select", { id: `${name}-choice`, title: help });
  const add = make("button", { type: "button", class: "secondary", onclick: addChosen }, "Add");
  const entries = () => [...rows.children].map(({ entry }) => entry);
  const read = () => value.value.split(",").filter(Boolean).map((text) => text.split(":"));
  let names = [];

  function addChosen() {
    put([...entries(), [choice.value, weight.default]]);
    rows.lastChild.querySelector("[type=number]").select();
  }

  function put(next) {
    value.value = textOf(next);
    value.dispatchEvent(new Event("input", { bubbles: true }));
  }

  function rowOf(entry) {
    const [title, strength = weight.default, ...others] = entry;
    const change = (number, other) => {
      other.value = number.value;
      entry[1] = number.value || weight.default;
      value.value = textOf(entries());
    };
    const common = { min: weight.minimum, max: weight.maximum, step: STEP, value: strength };
    const said = `${weight.label} of ${title}`;
    const slider = make("input", {
      ...common, type: "range", "aria-label": `${said}, as a slider`,
      oninput: () => change(slider, number),
    });
    const number = make("input", {
      ...common, type: "number", step: "any", required: true, "aria-label": said,
      oninput: () => change(number, slider),
    });
    const remove = make("button", {
      type: "button", class: "quiet", "aria-label": `Remove ${title}`,
      onclick: () => {
        put(entries().filter((other) => other !== entry));
        (rows.querySelector("button") ?? choice).focus();
      },
    }, "✕");
    const more = others.length ? ` (${fields[2].label.toLowerCase()} ${others[0]})` : "";
    const words = make("span", { class: "words", title }, title + more);
    return Object.assign(make("li", {}, words, slider, number, remove), { entry });
  }

  function show() {
    if (textOf(entries()) !== textOf(read())) rows.replaceChildren(...read().map(rowOf));
    const used = entries().map(([title]) => title);
    const left = ["", ...names.filter((title) => !used.includes(title))];
    if (left.join() !== [...choice.options].map((option) => option.value).join()) {
      choice.replaceChildren(
        ...left.map((title) => make("option", { value: title }, title || "choose one…")));
    }
    choice.disabled = left.length === 1;
    add.disabled = !choice.value;
    field.hidden = !names.length && !used.length;
  }

  const field = make("div", { class: "field" },
    make("label", { for: choice.id }, label), rows, make("div", { class: "adder" }, choice, add), value);
  field.offer = (known) => {
    names = known;
    show();
  };
  form.addEventListener("input", show);
  return field;
}

const textOf = (entries) => entries.map((entry) => entry.join(":")).join(",");
