// One request: events go to the tiles, finished pictures to the gallery.

import { parametersIn } from "./picture_file.js";
import { requestOf } from "./requests.js";
import { generate, ServiceError } from "./service.js";

export async function draw(settings, tiles, signal, onDone) {
  const pictures = [];
  for await (const event of generate(requestOf(settings), signal)) {
    const tile = tiles[event.image_index];
    const kind = event.type.split(".")[1];
    if (kind === "progress") tile.progress(event);
    if (kind === "partial_image") await tile.preview(event);
    if (kind === "completed") {
      const picture = await pictureOf(event);
      // The typed prompt, before expansion.
      if (settings.expand_prompt) picture.typed = settings.prompt;
      pictures[event.image_index] = picture;
      onDone(picture, tile, settings);
    }
  }
  if (pictures.filter(Boolean).length < settings.n) throw new ServiceError(0);
  return pictures;
}

async function pictureOf({ b64_json, timings, flagged: isFlagged }) {
  const file = fileOf(b64_json);
  const seconds = timings.total_s - (timings.queue_s ?? 0);
  return { file, params: await parametersIn(file), seconds, made: Date.now(), isFlagged };
}

export function fileOf(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type: "image/png" });
}
