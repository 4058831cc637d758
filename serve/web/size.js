// The size: the model's own, a usual one, or any other.

import { byId, make } from "./elements.js";

const [list, across, down] = ["size", "across", "down"].map(byId);
const typed = make("option");

export function startSize() {
  across.oninput = down.oninput = write;
  byId("swap").onclick = () => {
    [across.value, down.value] = [down.value, across.value];
    write();
    list.dispatchEvent(new Event("input", { bubbles: true }));
  };
}

export function limitSize({ sizes, default_side: side, min_side: min, max_side: max, side_multiple: step }) {
  list.length = 1;
  sizes.forEach(offerSize);
  for (const input of [across, down]) Object.assign(input, { min, max, step, placeholder: side });
}

export function offerSize(value) {
  if (!has(value)) list.append(make("option", { value }, wordsOf(value)));
}

export function showSize() {
  if ([across, down].includes(document.activeElement)) return;
  [across.value, down.value] = list.value === "auto" ? ["", ""] : list.value.split("x");
}

function write() {
  const sides = [across.value || down.value, down.value || across.value];
  const value = sides[0] ? sides.join("x") : "auto";
  typed.remove();
  typed.value = value;
  typed.textContent = wordsOf(value);
  if (!has(value)) list.append(typed);
  list.value = value;
}

const wordsOf = (value) => value.replace("x", " × ");
const has = (value) => [...list.options].some((option) => option.value === value);
