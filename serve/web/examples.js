// Example prompts, with pictures for the embedded model.

import { fileOf } from "./drawing.js";
import { byId, chip, make, released } from "./elements.js";
import { writeForm } from "./form.js";
import { examples } from "./service.js";

const FEW = 3;
let chosen;

export async function offerExamples(model) {
  chosen = model;
  byId("toy")?.toggleAttribute("hidden", model !== "sdxl-mini");
  const all = await examples(model).catch(() => []);
  await released();
  if (model !== chosen) return;
  const prompts = all.filter((each) => !each.b64_json).map(({ prompt }) => prompt);
  const surprise = () => writeForm({ prompt: prompts[Math.floor(Math.random() * prompts.length)] });
  byId("examples").replaceChildren(...prompts.length > FEW
    ? [chip("Surprise me", surprise)]
    : prompts.map((prompt) => chip(prompt, () => writeForm({ prompt }))));
  const pictures = all.filter((each) => each.b64_json);
  byId("shown")?.replaceChildren(...pictures.map(shown));
  byId("shown")?.toggleAttribute("hidden", !pictures.length);
}

function shown({ prompt, seed, b64_json: base64 }) {
  const use = () => {
    writeForm({ prompt, seed });
    byId("generate").focus();
  };
  const image = make("img", { src: URL.createObjectURL(fileOf(base64)), alt: "" });
  return make("li", {}, make("button", { onclick: use }, image, make("span", { class: "hint" }, prompt)));
}
