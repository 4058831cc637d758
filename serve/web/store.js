// This browser's database. Nothing in it is sent anywhere.

const NAME = "sdxl-deepcache";
const VERSION = 2;
const PICTURES = "pictures";
const SOURCES = "sources";
const WORK = "work";

let opened;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => {
      const database = request.result;
      if (oldVersion < 1) {
        database.createObjectStore(PICTURES, { keyPath: "id", autoIncrement: true });
      }
      database.createObjectStore(SOURCES);
      database.createObjectStore(WORK);
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error);
  });
  return opened;
}

async function inStore(name, mode, act) {
  const transaction = (await open()).transaction(name, mode);
  const request = act(transaction.objectStore(name));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

const write = (name, act) => inStore(name, "readwrite", act);
const read = (name, act) => inStore(name, "readonly", act);

export const keep = (picture) => write(PICTURES, (store) => store.put(picture));
export const remove = (id) => write(PICTURES, (store) => store.delete(id));
export const kept = () => read(PICTURES, (store) => store.getAll());

export const keepSource = (digest, file) => write(SOURCES, (store) => store.put(file, digest));
export const keptSource = (digest) => read(SOURCES, (store) => store.get(digest));
export async function keepSourcesOf(digests) {
  const all = await read(SOURCES, (store) => store.getAllKeys());
  for (const digest of all.filter((each) => !digests.has(each))) {
    await write(SOURCES, (store) => store.delete(digest));
  }
}

export const keepWork = (name, work) => write(WORK, (store) => store.put(work, name));
export const keptWork = (name) => read(WORK, (store) => store.get(name));
