// What a picture is made from: as the form holds it, as the API is asked, as a person reads it.

const DEADLINE_S = 120;
const MOST_PREVIEWS = 3;

/** As GET /v1/models describes them; the page works with what it knows until then. */
let table = [];
export const learn = (parameters) => {
  table = parameters.filter(({ field }) => field !== "size");
};

/** The settings of whom nobody asked anything. */
export const usualSettings = () =>
  Object.fromEntries(table.map((each) => [each.name, each.default ?? ""]));

/** The control that an error of the service is about. */
export const controlFor = (field) => table.find((each) => each.field === field)?.name ?? field;

/** The request's JSON. The seed is put in as text: it may exceed what a number holds here. */
export function requestOf(settings) {
  const { n, size, expand_prompt } = settings;
  const body = {
    ...askedOf(settings),
    n,
    size,
    expand_prompt: expand_prompt || null,
    stream: true,
    partial_images: MOST_PREVIEWS,
    progress: true,
    // Whoever watches it form can wait.
    deadline_s: DEADLINE_S,
  };
  return withSeed(body, settings.seed);
}

/** The parameters as fields of a request; the seed apart. */
function askedOf({ n, size, expand_prompt, seed, ...settings }) {
  return Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== "")
    .map(([name, value]) => {
      const { field, type } = table.find((each) => each.name === name) ?? { field: name };
      return [field, type === "array" ? value.split(",").map(Number) : value];
    }));
}

function withSeed(body, seed) {
  const json = JSON.stringify(body);
  return seed ? `${json.slice(0, -1)},"seed":${BigInt(seed)}}` : json;
}

/** The form's settings that make this picture again. */
export function settingsOf({ model, width, height, ...params }) {
  const entries = Object.entries(params).map(([name, value]) => [name, asSetting(value)]);
  return {
    ...Object.fromEntries(entries),
    seed: String(params.seed),
    n: 1,
    size: `${width}x${height}`,
    // What it was made from is what the language model said already.
    expand_prompt: false,
  };
}

const asSetting = (value) => (Array.isArray(value) ? value.join(",") : value ?? "");

export const cacheWords = (interval) =>
  interval === 1 ? "off" : `every ${ordinal(interval)} step`;

const ordinal = (n) => `${n}${{ 2: "nd", 3: "rd" }[n] ?? "th"}`;

/** [name, value] pairs for people. */
export function factsOf({ params, seconds, made }) {
  const parameters = table.map(({ name, label }) => [label, wordsOf(name, params[name])]);
  return [
    ...parameters,
    ["Size", `${params.width} × ${params.height}`],
    ["Model", params.model],
    ["Made in", secondsWords(seconds)],
    ["Made", new Date(made).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })],
  ].filter(([, value]) => value);
}

const wordsOf = (name, value) =>
  name === "cache_interval" ? cacheWords(value) : String(asSetting(value));

export const secondsWords = (seconds) =>
  `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)}\u00a0s`;

/** The same request for a terminal. */
export function curlOf(params) {
  const settings = settingsOf(params);
  const body = { ...askedOf(settings), size: settings.size };
  const json = withSeed(body, settings.seed).replaceAll("'", "'\\''");
  const url = new URL("v1/images/generations", location.href);
  return `curl ${url} -H 'content-type: application/json' -d '${json}'`;
}

export function fileName({ params }) {
  const words = params.prompt.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60);
  return `${words.replace(/^-|-$/g, "") || "picture"}-${params.seed}.png`;
}
