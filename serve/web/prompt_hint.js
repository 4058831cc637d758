// Hints on a prompt before it is sent: words that the model does not know, and a length near the
// limit.

import { model } from "./connection.js";
import { byId, released } from "./elements.js";
import { examine } from "./service.js";

const PAUSE_MS = 300;
const NEAR = 0.75;

/** On words that the embedded model does not know. */
export const wordsOn = ({ unknown_words: unknown = [] }) => unknown.length
  ? "This toy model draws circles, squares, triangles, stars, rings and crosses, not " +
    `“${unknown.slice(0, 3).join("”, “")}”.`
  : "";

let timer;
let asked;

export function hint() {
  const prompt = byId("prompt").value;
  if (!model || prompt === asked) return;
  asked = prompt;
  clearTimeout(timer);
  timer = setTimeout(show, PAUSE_MS, prompt);
}

async function show(prompt) {
  const facts = await examine({ prompt, model: model.id }).catch(() => ({}));
  await released();
  if (prompt !== asked) return;
  const { tokens, max_tokens: most } = facts;
  byId("prompt-hint").textContent = wordsOn(facts);
  const isOver = tokens > most;
  byId("prompt-length").dataset.state = isOver ? "over" : "";
  byId("prompt-length").textContent =
    tokens > NEAR * most ? `${tokens} of ${most} tokens${isOver ? ": too long" : ""}` : "";
}
