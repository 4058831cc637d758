// The pictures, in this browser's own database. Nothing of them goes anywhere else.

const NAME = "sdxl-deepcache";
const PICTURES = "pictures";

let opened;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () =>
      request.result.createObjectStore(PICTURES, { keyPath: "id", autoIncrement: true });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

/** Resolves when it is on disk, to what `act` asked for. */
async function inStore(mode, act) {
  const transaction = (await open()).transaction(PICTURES, mode);
  const request = act(transaction.objectStore(PICTURES));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** Resolves to its id. */
export const keep = (picture) => inStore("readwrite", (store) => store.add(picture));
export const remove = (id) => inStore("readwrite", (store) => store.delete(id));
export const removeAll = () => inStore("readwrite", (store) => store.clear());
/** The oldest first. */
export const kept = () => inStore("readonly", (store) => store.getAll());
