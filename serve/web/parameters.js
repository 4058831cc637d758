// What a picture is made from: as the form holds it, as the API is asked, as a person reads it.

const DEADLINE_S = 120;
const MOST_PREVIEWS = 3;

/** The request's JSON. The seed is put in as text: it may exceed what a number holds here. */
export function requestOf(settings) {
  const body = {
    prompt: settings.prompt,
    negative_prompt: settings.negative_prompt || null,
    n: settings.n,
    size: settings.size,
    steps: settings.steps,
    guidance_scale: settings.guidance,
    scheduler: settings.scheduler,
    cache_interval: settings.cache_interval,
    expand_prompt: settings.expand_prompt || null,
    stream: true,
    partial_images: MOST_PREVIEWS,
    progress: true,
    // Whoever watches it form can wait.
    deadline_s: DEADLINE_S,
  };
  return withSeed(body, settings.seed);
}

function withSeed(body, seed) {
  const json = JSON.stringify(body);
  return seed === "" ? json : `${json.slice(0, -1)},"seed":${BigInt(seed)}}`;
}

/** The form's settings that make this picture again. */
export function settingsOf(params) {
  return {
    prompt: params.prompt,
    negative_prompt: params.negative_prompt ?? "",
    n: 1,
    size: `${params.width}x${params.height}`,
    steps: params.steps,
    guidance: params.guidance,
    seed: String(params.seed),
    scheduler: params.scheduler,
    cache_interval: params.cache_interval,
    // What it was made from is what the language model said already.
    expand_prompt: false,
  };
}

export const cacheWords = (interval) =>
  interval === 1 ? "off" : `every ${ordinal(interval)} step`;

const ordinal = (n) => `${n}${{ 2: "nd", 3: "rd" }[n] ?? "th"}`;

/** [name, value] pairs for people. */
export function factsOf({ params, seconds, made }) {
  return [
    ["Prompt", params.prompt],
    ["Negative prompt", params.negative_prompt],
    ["Size", `${params.width} × ${params.height}`],
    ["Seed", String(params.seed)],
    ["Steps", String(params.steps)],
    ["Guidance", String(params.guidance)],
    ["Scheduler", params.scheduler],
    ["DeepCache", cacheWords(params.cache_interval)],
    ["Model", params.model],
    ["Made in", secondsWords(seconds)],
    ["Made", new Date(made).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })],
  ].filter(([, value]) => value);
}

export const secondsWords = (seconds) =>
  `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)}\u00a0s`;

/** The same request for a terminal. */
export function curlOf(params) {
  const { prompt, negative_prompt, size, steps, guidance, seed, scheduler, cache_interval } =
    settingsOf(params);
  const body = { prompt, negative_prompt, size, steps, guidance_scale: guidance };
  if (!negative_prompt) delete body.negative_prompt;
  const json = withSeed({ ...body, scheduler, cache_interval }, seed).replaceAll("'", "'\\''");
  const url = new URL("v1/images/generations", location.href);
  return `curl ${url} -H 'content-type: application/json' -d '${json}'`;
}

export function fileName({ params }) {
  const words = params.prompt.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60);
  return `${words.replace(/^-|-$/g, "") || "picture"}-${params.seed}.png`;
}
