// A picture by OpenAI's client for node: npm install openai; node generate.mjs "a red circle" out.png
import { writeFile } from "node:fs/promises";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});
const [prompt, file] = process.argv.slice(2);
const models = await client.models.list();
const model = models.data.find((each) => each.id.includes("sdxl")).id;
const answer = await client.images.generate({ model, prompt, seed: 7 });
await writeFile(file, Buffer.from(answer.data[0].b64_json, "base64"));
console.log(`${file}: ${answer.size}`);
