// The part of the service's API that this page uses. Every failure is a ServiceError.

import { eventsOf } from "./events.js";
import { storedKey } from "./key.js";
import { parse } from "./picture_file.js";

export class ServiceError extends Error {
  /** `status` 0: no answer, or a broken one. */
  constructor(status, { message = "", param = null, code = null } = {}, retryAfterS = null) {
    super(message);
    Object.assign(this, { status, param, code, retryAfterS });
  }
}

export async function describe() {
  const { data } = await (await call("v1/models")).json();
  const models = data.filter((model) => model.images);
  return { models, chat: data.find((model) => !model.images)?.id };
}

export const ready = () => call("readyz");

export const examples = async (model) =>
  (await (await call(`v1/images/examples?model=${encodeURIComponent(model)}`)).json()).data;

export const examine = async (asked) =>
  (await call("v1/images/prompts", { method: "POST", ...json(asked) })).json();

export const readSettings = async ({ parameters, prompt }) => parse(
  await (await call("v1/images/settings", { method: "POST", ...json({ parameters, prompt }) })).text());

export async function preprocessed(image, preprocess, low, high) {
  const asked = json({ image, preprocess, low, high });
  const { b64_json: found } = await (await call("v1/images/maps", { method: "POST", ...asked })).json();
  return `data:image/png;base64,${found}`;
}

export const generate = ({ path, ...request }, signal) => stream(path, { ...request, signal });

export const chat = (asked, signal) =>
  stream("v1/chat/completions", { ...json({ ...asked, stream: true }), signal });

export const json = (value) =>
  ({ body: JSON.stringify(value), headers: { "content-type": "application/json" } });

async function* stream(path, request) {
  const answer = await call(path, { method: "POST", ...request });
  try {
    for await (const event of eventsOf(answer.body)) {
      if (event.error) throw new ServiceError(500, event.error);
      yield event;
    }
  } catch (error) {
    throw asServiceError(error);
  }
}

async function call(path, options = {}) {
  const key = storedKey();
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    throw asServiceError(error);
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  const seconds = Number(answer.headers.get("retry-after")) || null;
  throw new ServiceError(answer.status, body.error, seconds);
}

// An abort is deliberate and stays an AbortError.
function asServiceError(error) {
  const isKnown = error instanceof ServiceError || error.name === "AbortError";
  return isKnown ? error : new ServiceError(0);
}
