// DeepCache off and on: the same request twice, one after the other to be timed.

import { draw } from "./drawing.js";
import { cacheWords } from "./parameters.js";

/** [off, on]: the settings of either side. */
export function sidesOf(settings) {
  const seed = settings.seed || String(crypto.getRandomValues(new Uint32Array(1))[0]);
  const on = Math.max(settings.cache_interval, 2);
  return [1, on].map((cache_interval) => ({ ...settings, seed, n: 1, cache_interval }));
}

export const titlesOf = (sides) =>
  sides.map((side) => `DeepCache ${cacheWords(side.cache_interval)}`);

/** Resolves to what the comparison showed, in words. */
export async function compare(sides, tiles, signal, onDone) {
  const seconds = [];
  for (const [i, side] of sides.entries()) {
    const [picture] = await draw(side, [tiles[i]], signal, onDone);
    seconds.push(picture.seconds);
  }
  const ratio = seconds[0] / seconds[1];
  if (ratio < 1.05) return "The same seed. DeepCache gained no time here.";
  return `The same seed, ${ratio.toFixed(1)} times as fast with DeepCache.`;
}
