// Prompts to begin with, and the few words that the embedded model knows (sdxl/mini/README.md).

const SHAPES = ["circle", "square", "triangle", "star", "ring", "cross"];
const COLOURS = ["red", "yellow", "green", "blue", "white", "black", "purple", "orange"];
const PLACES = ["on the left", "on the right", "in the center"];
const OTHERS =
  "a an and above at background below big bottom center in large left medium of on right small " +
  "the three to top two";
const EMBEDDED = /-mini$/;

const EXAMPLES = {
  embedded: [
    "a red circle on a blue background",
    "a yellow star on a black background",
    "two white squares on a purple background",
  ],
  any: [
    "a lighthouse at dusk, waves against the rocks, oil painting",
    "a bowl of lemons by a window, morning light, photograph",
    "macro photograph of a beetle on a fern, shallow depth of field",
  ],
};

const isEmbedded = (model) => EMBEDDED.test(model);

export const examplesFor = (model) => EXAMPLES[isEmbedded(model) ? "embedded" : "any"];

/** Another prompt, or null for a model whose language nobody can list. */
export function surprise(model) {
  if (!isEmbedded(model)) return null;
  const background = pick(COLOURS);
  const colour = pick(COLOURS.filter((each) => each !== background));
  const shape = pick(SHAPES);
  const thing = `${article(colour)} ${shape}`;
  const subject = pick([
    thing,
    `${thing} ${pick(PLACES)}`,
    `two ${colour} ${plural(shape)}`,
    `three ${colour} ${plural(shape)}`,
  ]);
  return `${subject} on ${article(background)} background`;
}

/** Words of a prompt that mean nothing to this model. */
export function unknownWords(prompt, model) {
  if (!isEmbedded(model)) return [];
  const known = new Set([...SHAPES, ...SHAPES.map(plural), ...COLOURS, ...OTHERS.split(" ")]);
  const words = prompt.toLowerCase().match(/\p{L}+/gu) ?? [];
  return [...new Set(words.filter((word) => !known.has(word)))];
}

const pick = (from) => from[Math.floor(Math.random() * from.length)];
const article = (word) => `${/^[aeiou]/.test(word) ? "an" : "a"} ${word}`;
const plural = (shape) => shape + (shape === "cross" ? "es" : "s");
