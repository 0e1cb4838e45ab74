/** Keep chats in the browser's IndexedDB, a record each, so that two tabs do not overwrite each other's. */

let opened = null;

function open() {
  return opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(`atom ${location.pathname}`, 1);
    request.onupgradeneeded = () => request.result.createObjectStore("chats", {keyPath: "id"});
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function run(mode, act) {
  const transaction = (await open()).transaction("chats", mode), request = act(transaction.objectStore("chats"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** All chats, the latest first. */
export const readChats = async () => (await run("readonly", store => store.getAll())).sort((a, b) => b.updated - a.updated);
export const saveChat = chat => run("readwrite", store => store.put(chat));
export const deleteChat = id => run("readwrite", store => store.delete(id));
