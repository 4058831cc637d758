// Files as one zip archive. They are stored as they are: pictures are compressed already.

export const MOST_BYTES = 2 ** 32 - 2 ** 24;
const VERSION = 20, UTF8 = 0x800, STORED = 0;
const CRCS = Uint32Array.from({ length: 256 }, (_, crc) => {
  for (let bit = 0; bit < 8; bit += 1) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  return crc;
});

function crcOf(bytes) {
  let crc = -1;
  for (const byte of bytes) crc = CRCS[(crc ^ byte) & 255] ^ (crc >>> 8);
  return ~crc;
}

/** Numbers, the lowest byte first; each comes with its bytes. */
const record = (...fields) => Uint8Array.from(fields.flatMap(([size, value]) =>
  Array.from({ length: size }, (_, i) => (value >>> (8 * i)) & 255)));

const stampOf = (at) => [
  [2, (at.getHours() << 11) | (at.getMinutes() << 5) | (at.getSeconds() >> 1)],
  [2, ((at.getFullYear() - 1980) << 9) | ((at.getMonth() + 1) << 5) | at.getDate()],
];

export async function zipOf(files) {
  const parts = [], directory = [];
  let offset = 0;
  for (const { name, file, made } of files) {
    const title = new TextEncoder().encode(name);
    const crc = crcOf(new Uint8Array(await file.arrayBuffer()));
    const facts = record([2, VERSION], [2, UTF8], [2, STORED], ...stampOf(new Date(made)), [4, crc],
      [4, file.size], [4, file.size], [2, title.length], [2, 0]);
    const header = [record([4, 0x04034b50]), facts, title];
    parts.push(...header, file);
    directory.push(record([4, 0x02014b50], [2, VERSION]), facts, record([6, 0], [4, 0], [4, offset]), title);
    offset += file.size + header.reduce((sum, { length }) => sum + length, 0);
  }
  const { size } = new Blob(directory);
  const count = [2, files.length];
  const end = record([4, 0x06054b50], [4, 0], count, count, [4, size], [4, offset], [2, 0]);
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}
