// Comparisons: a picture with each value of one or two settings. DeepCache off and on are also timed
// when warm.

import { draw } from "./drawing.js";
import { secondsWords, titleOf } from "./parameters.js";

/** Timed runs of each side in turn; the pair on show came first and was the warm-up. */
const RUNS = 5;
/** Without previews, which take time too. */
const UNSEEN = [{ progress() {}, preview() {} }];

export const axisOfDeepCache = ({ cache_interval: interval }) =>
  ({ name: "cache_interval", values: [1, Math.max(2, interval)] });

/** The settings of each picture, row by row. */
export const cellsOf = (settings, axes) => axes.reduceRight((all, { name, values }) =>
  all.flatMap((each) => values.map((value) => ({ ...each, n: 1, [name]: value }))), [settings]);

export const titlesOf = ({ name, values }) => values.map((value) => titleOf(name, value));

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
