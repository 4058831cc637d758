// The dialog that picks one or two settings, and values of each, for a comparison.

import { controlOf } from "./controls.js";
import { ask, byId, make } from "./elements.js";
import { readForm, valueIn } from "./form.js";
import { titleOf } from "./parameters.js";

const axes = ["Columns", "Rows"].map(makeAxis);
let known = [];

export function offerAxes(parameters) {
  const sizes = [...byId("size").options];
  const size = { choices: sizes.map(({ value }) => value), labels: sizes.map(({ text }) => text) };
  known = [
    ...parameters.filter(({ field, items }) => field !== "size" && items !== "object"),
    { name: "size", label: "Size", ...size },
  ];
  for (const axis of axes) axis.offer();
  byId("axes").replaceChildren(...axes.map(({ field }) => field));
}

/** An axis is { name, values }. None if the dialog is dismissed. */
export async function askForAxes() {
  const isMeant = (await ask(byId("axes-dialog"))) === "compare";
  return isMeant ? axes.map((axis) => axis.read()).filter(({ name }) => name) : [];
}

function makeAxis(title, place) {
  const list = make("select", { id: `axis-${place}`, required: !place, onchange: show });
  const values = make("div", { class: "field" });
  const field = make("div", { class: "field" }, make("label", { for: list.id }, title), list, values);
  let each, control;

  function offer() {
    const { value } = list;
    const none = make("option", { value: "" }, place ? "none" : "choose one…");
    list.replaceChildren(none, ...known.map(({ name, label }) => make("option", { value: name }, label)));
    if (known.some(({ name }) => name === value)) list.value = value;
    else show();
  }

  function show() {
    each = known.find(({ name }) => name === list.value);
    values.replaceChildren();
    if (!each) return;
    const id = `values-${place}`;
    control = makeValues(each, id);
    control.oninput = check;
    values.append(make("label", { for: id, class: "hint" },
      each.choices ? "Its values; Ctrl and a click for several" : "Its values, one a line"), control);
  }

  function check() {
    if (each.choices) return;
    const probe = controlOf(each);
    const wrong = textsIn(control, each).find((text) => {
      probe.value = text;
      return probe.value !== text || !probe.checkValidity();
    });
    control.setCustomValidity(wrong === undefined
      ? ""
      : `${titleOf(each.name, wrong)}: ${probe.validationMessage || "This is no number."}`);
  }

  const read = () =>
    ({ name: each?.name, values: each ? textsIn(control, each).map((text) => valueIn(each.name, text)) : [] });

  return { field, offer, read };
}

function makeValues(each, id) {
  const now = String(readForm()[each.name] ?? "");
  const control = each.choices ? controlOf(each) : make("textarea", { rows: 3, spellcheck: "false" }, now);
  control.removeAttribute("name");
  Object.assign(control, { id, required: true, multiple: true, size: 6 });
  for (const option of control.options ?? []) option.selected = option.value === now;
  return control;
}

/** Numbers may also have commas or spaces between them. */
function textsIn(control, { type }) {
  if (control.options) return [...control.selectedOptions].map(({ value }) => value);
  const between = ["integer", "number"].includes(type) ? /[\s,]+/ : "\n";
  return control.value.split(between).map((text) => text.trim()).filter(Boolean);
}
