// Hints on a prompt before it is sent: words that the model does not know, and a length near the
// limit.

import { model } from "./connection.js";
import { byId, released } from "./elements.js";
import { examine } from "./service.js";

const PAUSE_MS = 300;
const NEAR = 0.75;

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
  const { tokens, max_tokens: most, unknown_words: unknown = [] } = facts;
  byId("prompt-hint").textContent = unknown.length
    ? "This toy model draws circles, squares, triangles, stars, rings and crosses, not " +
      `“${unknown.slice(0, 3).join("”, “")}”.`
    : "";
  const isOver = tokens > most;
  byId("prompt-length").dataset.state = isOver ? "over" : "";
  byId("prompt-length").textContent =
    tokens > NEAR * most ? `${tokens} of ${most} tokens${isOver ? ": too long" : ""}` : "";
}
