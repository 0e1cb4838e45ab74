/** The images of the message that is typed: chosen, pasted or dropped, and shown above it until it is sent. */

import {announce, button, byId, element} from "./dom.js";

const SENT_AS_IT_IS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_BYTES = 4 << 20, MAX_SIDE = 3072;  // of a file that is sent as it is, and in pixels of any other one
const list = byId("attached"), refused = byId("refused"), model = byId("model"), chat = byId("chat");

/** An image of a message on the screen. */
export function makeImage(url, number) {
  return Object.assign(element("img"), {src: url, alt: `Image ${number}`});
}

export class Images {
  urls = [];  // data: URLs
  reading = Promise.resolve();  // files that were chosen come in their order

  constructor() {
    const files = byId("files");
    byId("attach").addEventListener("click", () => files.click());
    files.addEventListener("change", () => { this.add([...files.files]); files.value = ""; });
    model.addEventListener("change", () => this.draw());
    byId("message").addEventListener("paste", event => {
      const data = event.clipboardData;
      if (!data.types.includes("text/plain")) this.take(event, data);  // cells of a spreadsheet are text and a picture of it
    });
    for (const name of ["dragenter", "dragover"]) document.addEventListener(name, event => this.showDrop(event, true));
    for (const name of ["dragleave", "drop"]) document.addEventListener(name, event => this.showDrop(event, false));
    document.addEventListener("drop", event => this.take(event, event.dataTransfer));
  }

  set(urls) {
    this.urls = urls;
    this.draw();
  }

  clear() {
    refused.textContent = "";
    this.set([]);
  }

  /** Take the files of a clipboard, or of what was dropped; text goes where it always does. */
  take(event, {files}) {
    if (!files.length) return;
    event.preventDefault();
    this.add([...files]);
  }

  showDrop(event, isOver) {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();  // else the browser would open the file
    chat.classList.toggle("dropping", isOver);
  }

  add(files) {
    refused.textContent = "";
    if (!readsImages()) {
      refused.textContent = `${model.value || "The model"} reads no images.`;
      return;
    }
    for (const file of files) {
      const read = readImage(file).catch(() => null);
      this.reading = this.reading.then(async () => {
        const url = await read;
        if (url) this.set([...this.urls, url]);
        if (url) announce(`${file.name} attached`);
        else refused.textContent = `${file.name} is no image that this browser can read.`;
      });
    }
  }

  remove(at) {
    refused.textContent = "";
    this.set(this.urls.filter((_, index) => index !== at));
    announce("Removed");
    byId("message").focus();
  }

  draw() {
    byId("attach").hidden = !readsImages();
    list.hidden = !this.urls.length;
    list.replaceChildren(...this.urls.map((url, at) => {
      const remove = button("×", () => this.remove(at), "small");
      remove.setAttribute("aria-label", `Remove image ${at + 1}`);
      return element("li", "", makeImage(url, at + 1), remove);
    }));
  }
}

const readsImages = () => model.selectedOptions[0]?.dataset.images === "true";

/** The data: URL of a file. One that is large, or of a kind that servers do not read, is drawn anew. Throws if it is no image. */
async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  try {
    return SENT_AS_IT_IS.includes(file.type) && file.size <= MAX_BYTES ? await readUrl(file) : draw(bitmap);
  } finally {
    bitmap.close();
  }
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function draw(bitmap) {
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height)), canvas = element("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map(side => Math.max(1, Math.round(side * scale)));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";  // a JPEG has no transparent pixels
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}
