// Finding and making elements.

export const byId = (id) => document.getElementById(id);

/** An item of a list of chips. */
export const chip = (text, onclick) =>
  make("li", {}, make("button", { type: "button", class: "chip", onclick }, text));

/** A control that moves while pressed gets no click. */
export async function released() {
  while (document.querySelector(":active")) await new Promise(requestAnimationFrame);
}

/** make("li", { class: "thumb" }, child, "text") */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element[name] = value;
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}
