// Two pictures in one place; a slider sets how much of each shows.

import { make } from "./elements.js";

export function makeWipe(before, after, [width, height], [left, right]) {
  const slider = make("input", {
    type: "range", min: 0, max: 100, value: 50, "aria-label": `Visible part of ${left}`,
    oninput: () => wipe.style.setProperty("--at", `${slider.value}%`),
  });
  const wipe = make("div", { class: "easel wipe" },
    make("img", { src: after, alt: right }),
    make("img", { src: before, alt: left, class: "before" }),
    ...[left, right].map((words) => make("span", { "aria-hidden": true }, words)),
    slider);
  wipe.style.setProperty("--ratio", width / height);
  return wipe;
}
