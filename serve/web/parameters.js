// A picture's parameters: in the form, in a request, in words.

let table = [];
export const learn = (parameters) => {
  table = parameters.filter(({ field }) => field !== "size");
};

export const usualSettings = () =>
  Object.fromEntries(table.map((each) => [each.name, each.default ?? ""]));

export const controlFor = (field) => table.find((each) => each.field === field)?.name ?? field;

export function fieldsOf(settings) {
  return Object.fromEntries(Object.entries(settings)
    .filter(([, value]) => value !== "" && value !== false)
    .map(([name, value]) => {
      const { field, type, items } = table.find((each) => each.name === name) ?? { field: name };
      const parse = items === "object" ? String : Number;
      const listed = () => value.startsWith("[") ? JSON.parse(value) : value.split(",").map(parse);
      return [field, type === "array" ? listed() : value];
    }));
}

/** Lists whose entries have pictures. */
export const PICTURED = ["controls", "image_prompts"];

/** Their entries in settings. */
export const picturedIn = (settings) => PICTURED.flatMap((name) => JSON.parse(settings[name] || "[]"));

/** Their entries in a picture's metadata. */
export const picturedOf = (params) => PICTURED.flatMap((name) => params[name] ?? []);

export const isEdit = (params) => params.image_sha256 !== undefined;

export function settingsOf({ width, height, ...params }) {
  // Before the service describes them: the picture's.
  const each = table.length ? table : Object.keys(params).map((name) => ({ name }));
  const entries = each.map(({ name, default: usual }) => [name, asSetting(params[name] ?? usual)]);
  return {
    ...Object.fromEntries(entries),
    seed: String(params.seed ?? ""),
    n: 1,
    size: width && height ? `${width}x${height}` : "auto",
    // Its prompt is already expanded.
    expand_prompt: false,
  };
}

function asSetting(value, comma = ",") {
  if (!Array.isArray(value)) return value ?? "";
  return hasMaps(value) ? JSON.stringify(value) : value.map(asText).join(comma);
}

const hasMaps = (value) => Array.isArray(value) && value.some((entry) => entry?.image !== undefined);

/** A number, or an object as a:0.8. */
const asText = (entry) => Object(entry) === entry
  ? Object.values(entry).filter((part) => part !== null).join(":")
  : entry;

export const cacheWords = (interval) =>
  interval === 1 ? "off" : interval ? `every ${ordinal(interval)} step` : "as many steps as needed";

const ordinal = (n) => `${n}${{ 2: "nd", 3: "rd" }[n] ?? "th"}`;

export const FLAGGED = "Blurred: the safety checker flagged it";

export function factsOf({ params, seconds, made, typed, isFlagged }) {
  const parameters = table.map(({ name, label }) => [label, wordsOf(name, params[name])]);
  return [
    ["Safety", isFlagged && FLAGGED],
    ["Typed", typed],
    ...parameters,
    ["Size", [params.width, params.height]
      .map((side) => Math.round(side * (params.upscale ?? 1) / 8) * 8).join(" × ")],
    ["Model", params.model],
    ["Made in", secondsWords(seconds)],
    ["Made", new Date(made).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })],
  ].filter(([, value]) => value);
}

/** A setting and its value, as one title. */
export function titleOf(name, value) {
  if (name === "prompt") return value;
  const label = name === "size" ? "Size" : table.find((each) => each.name === name)?.label ?? name;
  return `${label} ${name === "size" ? value.replace("x", " × ") : wordsOf(name, value)}`;
}

function wordsOf(name, value) {
  if (name === "cache_interval") return cacheWords(value);
  if (hasMaps(value)) return value.map((entry) => `${entry.name} ${entry.strength}`).join(", ");
  const { choices, labels } = table.find((each) => each.name === name) ?? {};
  return labels?.[choices.indexOf(value)] ?? String(asSetting(value, ", "));
}

export const secondsWords = (seconds) =>
  `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)}\u00a0s`;

export const leftWords = (seconds) => `about ${Math.max(1, Math.round(seconds))}\u00a0s`;

export function fileName({ params }) {
  const words = params.prompt.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60);
  return `${words.replace(/^-|-$/g, "") || "picture"}-${params.seed}.png`;
}
