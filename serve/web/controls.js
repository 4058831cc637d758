// The form's controls for parameters that the service describes. The page itself has those for the
// prompt, DeepCache and the size.

import { byId, make } from "./elements.js";
import { makeMapPicker } from "./map_picker.js";
import { makePicker } from "./picker.js";

/** The lists of names for a field, if they differ from it. */
const NAMES = { controls: "controlnets", image_prompts: "ip_adapters" };

/** `images` as GET /v1/models describes it. */
export function buildControls(form, images) {
  for (const each of images.parameters) {
    const own = form.querySelector(`[data-parameter=${each.name}]`);
    if (own) own.title = each.help;
    else if (each.items === "object") offerNames(each, form, images[NAMES[each.field] ?? each.field] ?? []);
    else if (each.field !== "size" && !form.elements[each.name]) place(each);
  }
}

function offerNames(each, form, names) {
  if (!form.elements[each.name]) {
    const hasMaps = each.fields.some(({ name }) => name === "image");
    const made = hasMaps ? makeMapPicker(each, form, controlOf) : makePicker(each, form);
    byId("pickers").append(made);
  }
  form.elements[each.name].closest(".field").offer(names);
}

/** Defaults of empty controls of edits. */
export function showEditDefaults(form, parameters, hasMask) {
  for (const { name, edit_defaults: usual } of parameters) {
    if (!usual) continue;
    form.elements[name].placeholder = usual[Number(hasMask)];
    byId(`${name}-slider`).value = form.elements[name].value || usual[Number(hasMask)];
  }
}

function place(each) {
  const control = controlOf(each);
  const label = make("label", { for: each.name }, each.label);
  const field = make("div", { class: "field" }, label, control);
  if (each.edit_defaults) field.append(sliderOf(each, control));
  byId(placeOf(each)).append(field);
}

function placeOf({ is_for_edits, is_for_masks, edit_defaults }) {
  if (is_for_masks) return "mask-parameters";
  if (is_for_edits) return edit_defaults ? "edit-parameters" : "edit-details";
  return "parameters";
}

const LISTS = { integer: "[0-9]+(,[0-9]+)*", number: "[0-9.]+(,[0-9.]+)*" };

function controlOf(
  { name, type, items, help, placeholder, default: usual, minimum, maximum, choices },
) {
  const common = { id: name, name, title: help, placeholder: placeholder || null };
  if (choices) {
    const options = choices.map((value) => {
      const isUnsaid = usual === undefined && value === placeholder;
      return make("option", { value: isUnsaid ? "" : value }, value.replaceAll("_", " "));
    });
    return make("select", common, ...options);
  }
  if (type === "string") {
    return make("textarea", { ...common, rows: 2, spellcheck: "false" });
  }
  const isLarge = type === "integer" && !(maximum <= Number.MAX_SAFE_INTEGER);
  if (type === "array" || isLarge) {
    const pattern = LISTS[items] ?? "[0-9]{1,19}";
    const inputmode = type === "array" ? "text" : "numeric";
    return make("input", { ...common, pattern, inputmode, autocomplete: "off" });
  }
  return make("input", {
    ...common, type: "number", step: type === "integer" ? "1" : "any", min: minimum ?? null,
    max: maximum ?? null, required: usual !== undefined,
  });
}

/** Without a name, so that the form ignores it. */
function sliderOf({ name, label, minimum, maximum }, control) {
  return make("input", {
    id: `${name}-slider`, type: "range", min: minimum, max: maximum, step: (maximum - minimum) / 20,
    "aria-label": `${label}, as a slider`,
    oninput: ({ target }) => { control.value = target.value; },
  });
}
