// Texts in a PNG: the service writes its parameters into one named `sdxl`.

const SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];

export async function textsIn(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  if (!SIGNATURE.every((value, i) => bytes[i] === value)) return {};
  return Object.fromEntries([...chunksOf(bytes)].map(({ type, data }) => textOf(type, data)));
}

export async function parametersIn(blob) {
  const found = parse((await textsIn(blob)).sdxl);
  return typeof found?.prompt === "string" ? found : null;
}

function* chunksOf(bytes) {
  const view = new DataView(bytes.buffer);
  for (let at = SIGNATURE.length; at + 12 <= bytes.length; ) {
    const length = view.getUint32(at);
    const type = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    yield { type, data: bytes.subarray(at + 8, at + 8 + length) };
    at += 12 + length;
  }
}

function textOf(type, data) {
  const end = data.indexOf(0);
  const name = new TextDecoder("latin1").decode(data.subarray(0, end));
  if (type === "tEXt") return [name, new TextDecoder("latin1").decode(data.subarray(end + 1))];
  if (type !== "iTXt") return [null, ""];
  // Then two bytes on compression, a language and a translated name, each ended by a zero.
  const language = data.indexOf(0, end + 3);
  const translated = data.indexOf(0, language + 1);
  return [name, new TextDecoder().decode(data.subarray(translated + 1))];
}

/** Seeds may exceed a number here, so they stay text. */
export function parse(text = "") {
  try {
    return JSON.parse(text.replace(/("(?:variation_)?seed": *)(\d+)/g, '$1"$2"'));
  } catch {
    return null;
  }
}
