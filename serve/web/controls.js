// The form's controls for a picture's parameters, made as the service describes them. Those that
// the page has in a form of its own (the prompt, DeepCache, the size) only get their words.

import { byId, make } from "./elements.js";

/** A control for each of the parameters, below "More settings". */
export function buildControls(form, parameters) {
  for (const each of parameters) {
    const own = form.querySelector(`[data-parameter=${each.name}]`);
    if (own) own.textContent = each.label;
    else if (each.field !== "size" && !form.elements[each.name]) place(each);
  }
}

function place(each) {
  const control = controlOf(each);
  const label = make("label", { for: each.name, title: each.help }, each.label);
  const field = make("div", { class: "field" }, label, control);
  const isWide = control.tagName === "TEXTAREA";
  byId(isWide ? "wide-parameters" : "parameters").append(field);
}

const LISTS = { integer: "[0-9]+(,[0-9]+)*", number: "[0-9.]+(,[0-9.]+)*" };

function controlOf(
  { name, type, items, help, placeholder, default: usual, minimum, maximum, choices },
) {
  const common = { id: name, name, title: help, placeholder: placeholder || null };
  if (choices) {
    const options = choices.map((value) => make("option", { value }, value.replaceAll("_", " ")));
    return make("select", common, ...options);
  }
  if (type === "string") {
    return make("textarea", { ...common, rows: 2, spellcheck: "false" });
  }
  if (usual === undefined) {
    // May stay empty, and may be larger than a number holds here.
    const pattern = LISTS[items] ?? "[0-9]{1,19}";
    const inputmode = type === "array" ? "text" : "numeric";
    return make("input", { ...common, pattern, inputmode, autocomplete: "off" });
  }
  const step = type === "integer" ? "1" : "any";
  return make("input", {
    ...common, type: "number", step, min: minimum ?? null, max: maximum ?? null, required: true,
  });
}
