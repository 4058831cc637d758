// DeepCache off and on: the same picture with both, and the time of each when warm.

import { draw } from "./drawing.js";
import { cacheWords, secondsWords } from "./parameters.js";

/** Timed runs of each side in turn; the pair on show came first and was the warm-up. */
const RUNS = 5;
/** Without previews, which take time too. */
const UNSEEN = [{ progress() {}, preview() {} }];

export function sidesOf(settings) {
  return [1, Math.max(2, settings.cache_interval)].map((cache_interval) => ({ ...settings, n: 1, cache_interval }));
}

export const titlesOf = (sides) =>
  sides.map((side) => `DeepCache ${cacheWords(side.cache_interval)}`);

export async function drawBoth(sides, tiles, signal, onDone) {
  for (const [i, side] of sides.entries()) await draw(side, [tiles[i]], signal, onDone);
}

export async function* timeBoth(sides, signal) {
  const seconds = [[], []];
  for (let run = 1; run <= RUNS; run += 1) {
    yield `Now both are timed: run ${run} of ${RUNS}.`;
    for (const [i, side] of sides.entries()) {
      const [picture] = await draw({ ...side, partial_images: 0 }, UNSEEN, signal, () => {});
      seconds[i].push(picture.seconds);
    }
  }
  yield found(seconds);
}

function found([off, on]) {
  const ratio = median(off) / median(on);
  const gain = ratio < 1.05 ? "no faster" : `${ratio.toFixed(1)} times as fast`;
  const [slow, fast] = [off, on].map((all) => secondsWords(median(all)));
  const wins = off.filter((seconds, i) => seconds > on[i]).length;
  return `The same seed, ${gain} with DeepCache: ${fast} against ${slow}, medians of ${RUNS} warm ` +
    `runs each; faster in ${wins} of ${RUNS} pairs.`;
}

const median = (values) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];
