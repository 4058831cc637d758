// A comparison as one picture, with the titles of its columns and rows.

const LONGEST = 8000;

export async function sheetOf(files, columns, rows = []) {
  const images = await Promise.all(files.map((file) => createImageBitmap(file)));
  const [width, height] = ["width", "height"].map((side) => Math.max(...images.map((image) => image[side])));
  const lines = Math.ceil(images.length / columns.length);
  const scale = Math.min(1, LONGEST / columns.length / width, LONGEST / lines / height);
  const [across, down] = [width * scale, height * scale];
  const text = Math.max(11, Math.round(across / 22));
  const gap = text / 2;
  const canvas = new OffscreenCanvas(1, 1);
  const context = canvas.getContext("2d");
  const font = `600 ${text}px system-ui, sans-serif`;
  context.font = font;
  const widths = rows.map((title) => context.measureText(title).width);
  const left = gap + (rows.length ? Math.min(across, Math.max(...widths)) + gap : 0);
  const top = text + 2 * gap;
  canvas.width = left + columns.length * (across + gap);
  canvas.height = top + lines * (down + gap);
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  Object.assign(context, { fillStyle: "black", font, textBaseline: "middle" });
  const x = (i) => left + (i % columns.length) * (across + gap);
  const y = (i) => top + Math.floor(i / columns.length) * (down + gap);
  columns.forEach((title, i) => context.fillText(title, x(i), top / 2, across));
  rows.forEach((title, i) => context.fillText(title, gap, y(i * columns.length) + down / 2, left - 2 * gap));
  images.forEach((image, i) => context.drawImage(image, x(i), y(i), image.width * scale, image.height * scale));
  return canvas.convertToBlob();
}
