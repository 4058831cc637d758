// Requests to the API: JSON for pictures from a prompt, a form for edits.

import { fieldsOf, isEdit, PICTURED } from "./parameters.js";
import { json } from "./service.js";

const DEADLINE_S = 120;
const MOST_PREVIEWS = 3;
const FROM_WORDS = "v1/images/generations";
const FROM_PICTURE = "v1/images/edits";

export function requestOf({ source, maps = {}, ...settings }) {
  const fields = {
    stream: true,
    partial_images: MOST_PREVIEWS,
    progress: true,
    deadline_s: DEADLINE_S,
    ...fieldsOf(settings),
  };
  for (const name of PICTURED) fields[name] &&= fields[name].map((entry) => withMap(entry, maps));
  return source ? formOf(fields, source) : { path: FROM_WORDS, ...jsonOf(fields) };
}

function withMap({ image, ...entry }, maps) {
  return maps[image] ? { ...entry, image: maps[image].url } : entry;
}

/** Seeds are text here, as they may exceed a number. */
function jsonOf(fields) {
  const { body, headers } = json(fields);
  return { body: body.replace(/("(?:variation_)?seed":)"(\d+)"/g, (_, name, seed) => name + BigInt(seed)), headers };
}

function formOf(fields, { file, mask }) {
  const body = new FormData();
  body.append("image", file, "image");
  if (mask) body.append("mask", mask, "mask.png");
  for (const [name, value] of Object.entries(fields)) body.append(name, textOf(value));
  return { path: FROM_PICTURE, body, headers: {} };
}

const textOf = (value) => Object(value?.[0]) === value?.[0] ? JSON.stringify(value) : value;

export function curlOf(settings, params) {
  const fields = fieldsOf(settings);
  const placed = { image: { url: "data:image/png;base64,…" } };
  for (const name of PICTURED) fields[name] &&= fields[name].map((entry) => withMap({ ...entry, image: "image" }, placed));
  const files = params.mask_sha256 ? "-F image=@image.png -F mask=@mask.png" : "-F image=@image.png";
  const texts = () => Object.entries(fields)
    .map(([name, value]) => `--form-string ${quoted(`${name}=${textOf(value)}`)}`);
  const [path, ...sent] = isEdit(params)
    ? [FROM_PICTURE, files, ...texts()]
    : [FROM_WORDS, "--json", quoted(jsonOf(fields).body)];
  return `curl ${new URL(path, location.href)} ${sent.join(" ")}`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
