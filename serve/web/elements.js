// Finding and making elements.

export const byId = (id) => document.getElementById(id);

export const chip = (text, onclick) =>
  make("li", {}, make("button", { type: "button", class: "chip", onclick }, text));

export function sliderAndNumber(common, said, change) {
  const slider = make("input", { ...common, type: "range", step: 0.05, "aria-label": `${said}, as a slider` });
  const number = make("input", { ...common, type: "number", step: "any", required: true, "aria-label": said });
  slider.oninput = () => change(number.value = slider.value);
  number.oninput = () => change(slider.value = number.value);
  return [slider, number];
}

export const remover = (title, onclick) =>
  make("button", { type: "button", class: "quiet", "aria-label": `Remove ${title}`, onclick }, "✕");

/** A control that moves while pressed gets no click. */
export async function released() {
  while (document.querySelector(":active")) await new Promise(requestAnimationFrame);
}

export function openAround(element) {
  for (let place = element; place; place = place.parentElement) {
    if (place.tagName === "DETAILS") place.open = true;
  }
}

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element[name] = value;
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export const download = (file, name) =>
  make("a", { href: URL.createObjectURL(file), download: name }).click();

/** The value of the button that closed it; "" if dismissed. */
export function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue);
  });
}
