// What people ask through OpenAI's client for node: `node calls.mjs URL FOLDER`, in a folder whose
// node_modules has it. tests/serve/service/clients/test_openai_node.py judges the line of JSON that it prints.
import { createReadStream } from "node:fs";
import { readFile } from "node:fs/promises";
import OpenAI, { toFile } from "openai";

const [url, folder] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
// Where others compute as well, a picture takes longer than it is given by default.
const deadline_s = 300;
const asked = { model: "sdxl-mini", prompt: "a green star", deadline_s };
const { model, prompt } = asked;
const chat = { model: "mini-llm", messages: [{ role: "user", content: "a red circle" }], temperature: 0 };
const long = { ...asked, n: 10, steps: 100 };

const picture = async (name) => toFile(await readFile(`${folder}/${name}`), name, { type: "image/png" });
const texts = (answer) => answer.data.map((each) => each.b64_json);
const events = async (stream) => {
  const found = [];
  for await (const event of stream) found.push(event);
  return found;
};
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// In how many seconds one more picture would be ready, as the refusal of one that is wanted at once says.
const ready = async () => {
  try {
    await client.images.generate({ model, prompt, steps: 1, deadline_s: 0.0001 });
    return 0;
  } catch (error) {
    return Number(/ready in ([\d.]+) s/.exec(error.message)[1]);
  }
};
const untilBusy = async () => {
  for (;;) {
    const seconds = await ready();
    if (seconds > 1) return seconds;
    await pause(50);
  }
};
// What was left must not go on: how long until the service has less than half of it before it.
const untilFree = async (busy) => {
  const began = Date.now();
  while (await ready() > busy / 2) await pause(50);
  return (Date.now() - began) / 1000;
};

const calls = {
  models: async () => [(await client.models.list()).data.map((each) => each.id), (await client.models.retrieve(model)).id],
  generate: async () => texts(await client.images.generate({
    ...asked, n: 2, size: "128x96", quality: "low", output_format: "webp", output_compression: 50,
    background: "auto", moderation: "low", style: "vivid", user: "me", seed: 5,
  })),
  url: async () => (await client.images.generate({ ...asked, steps: 2, response_format: "url" })).data[0].url,
  stream: async () => events(await client.images.generate({ ...asked, stream: true, partial_images: 2, steps: 12 })),
  edit: async () => texts(await client.images.edit({
    ...asked, n: 2, image: await picture("image.png"), mask: await picture("mask.png"), steps: 4, deep_steps: [0, 2],
  })),
  "edit of a stream": async () => texts(await client.images.edit({
    ...asked, image: [createReadStream(`${folder}/image.png`)], steps: 4,
  })),
  "edit stream": async () => events(await client.images.edit({
    ...asked, image: await picture("image.png"), stream: true, partial_images: 2, steps: 12,
  })),
  chat: async () => (await client.chat.completions.create(chat)).choices[0].message.content,
  "chat stream": async () => {
    const chunks = await events(await client.chat.completions.create({ ...chat, stream: true }));
    return chunks.map((chunk) => chunk.choices[0].delta.content ?? "");
  },
  "chat helper": async () => client.chat.completions.stream(chat).finalContent(),
  size: async () => client.images.generate({ model, prompt, size: "100x100" }),
  model: async () => client.images.generate({ model: "dall-e-2", prompt }),
  deadline: async () => client.images.generate({ model, prompt, deadline_s: 0.001 }),
  variation: async () => client.images.createVariation({ image: await picture("image.png") }),
  abort: async () => {
    const controller = new AbortController();
    const left = client.images.generate(long, { signal: controller.signal }).catch((error) => error.constructor.name);
    const busy = await untilBusy();
    controller.abort();
    return [await left, busy, await untilFree(busy)];
  },
  "abort of a stream": async () => {
    const stream = await client.images.generate({ ...long, stream: true, partial_images: 3 });
    for await (const event of stream) {
      const busy = await untilBusy();
      stream.controller.abort();
      return [event.type, busy, await untilFree(busy)];
    }
  },
  timeout: async () => client.images.generate(long, { timeout: 500 }),
};

const told = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    told[name] = await call();
  } catch (error) {
    const { status, code, param, requestID, message } = error;
    told[name] = { error: error.constructor.name, status, code, param, requestID, message };
  }
}
console.log(JSON.stringify(told));
