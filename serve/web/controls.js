// The form's controls for parameters that the service describes. The page itself has those for the
// prompt, DeepCache and the size.

import { byId, make } from "./elements.js";
import { makeMapPicker } from "./map_picker.js";
import { makePicker } from "./picker.js";

const NAMES = { controls: "controlnets", image_prompts: "ip_adapters" };

export function buildControls(form, images) {
  for (const each of images.parameters) {
    const own = form.querySelector(`[data-parameter=${each.name}]`);
    if (own) own.title = each.help;
    else if (each.items === "object") offerNames(each, form, images);
    else if (each.field !== "size" && !form.elements[each.name]) place(each);
  }
}

function offerNames(each, form, images) {
  if (!form.elements[each.name]) {
    const hasMaps = each.fields.some(({ name }) => name === "image");
    const made = hasMaps ? makeMapPicker(each, form, controlOf) : makePicker(each, form);
    byId("pickers").append(made);
  }
  const names = images[NAMES[each.field] ?? each.field] ?? [];
  form.elements[each.name].closest(".field").offer(names, images.embeddings);
}

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
  placeOf(each).append(field);
  // Now the control has its form.
  if (each.switch) field.prepend(switchOf(each, control, label));
}

function placeOf({ is_for_edits, is_for_masks, edit_defaults, group }) {
  if (is_for_masks) return byId("mask-parameters");
  if (is_for_edits) return byId(edit_defaults ? "edit-parameters" : "edit-details");
  return group ? placeOfGroup(group) : byId("parameters");
}

function placeOfGroup(title) {
  const id = `group-${title}`;
  if (!byId(id)) {
    byId("groups").append(make("details", {},
      make("summary", {}, title), make("div", { class: "pair", id })));
  }
  return byId(id);
}

const LISTS = { integer: "[0-9]+(,[0-9]+)*", number: "[0-9.]+(,[0-9.]+)*" };

export function controlOf(
  { name, type, items, help, placeholder, default: usual, minimum, maximum, choices, labels },
) {
  const common = { id: name, name, title: help, placeholder: placeholder || null };
  if (choices) {
    const options = choices.map((value, i) => {
      const isUnsaid = usual === undefined && value === placeholder;
      return make("option", { value: isUnsaid ? "" : value }, labels?.[i] ?? value);
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

/** A checkbox that shows the field and fills it, or empties it. */
function switchOf({ switch: title, switch_value: first }, control, label) {
  const show = () => {
    if (document.activeElement === control) return;
    box.checked = control.value !== "";
    control.hidden = label.hidden = !box.checked;
  };
  const box = make("input", { type: "checkbox", oninput: () => {
    control.value = box.checked ? first : "";
  } });
  control.form.addEventListener("input", show);
  return make("label", { class: "check" }, box, title);
}

function sliderOf({ name, label, minimum, maximum }, control) {
  return make("input", {
    id: `${name}-slider`, type: "range", min: minimum, max: maximum, step: (maximum - minimum) / 20,
    "aria-label": `${label}, as a slider`,
    oninput: ({ target }) => { control.value = target.value; },
  });
}
