/** The list of kept chats: open, delete, export. */

import {announce, button, byId, download, element} from "./dom.js";
import {deleteChat, readChats, saveChat} from "./store.js";

const list = byId("kept");

export class Chats {
  chats = [];
  deleted = new Set();  // ids: an answer on its way is not kept any more

  /** onOpen: is called with the chat that is to be shown, or with nothing for a new one. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.shown = null;  // its id
    byId("anew").addEventListener("click", () => this.open());
    byId("export").addEventListener("click", () => this.export());
    byId("export-all").addEventListener("click", () => download("chats.json", "application/json", JSON.stringify(this.chats, null, 1)));
  }

  async load() {
    try {
      this.chats = await readChats();
    } catch (error) {
      this.showFault(error);
    }
    this.draw();
  }

  /** Keep a chat; the latest one comes first. */
  async keep(chat) {
    if (this.deleted.has(chat.id)) return;
    this.chats = [chat, ...this.chats.filter(each => each.id !== chat.id)];
    this.draw();
    try {
      await saveChat(chat);
    } catch (error) {
      this.showFault(error);
    }
  }

  showFault(error) {
    byId("fault").textContent = `Chats are not kept: ${error?.message || "this browser keeps nothing"}`;
  }

  open(chat) {
    this.onOpen(chat && structuredClone(chat));
  }

  select(id) {
    this.shown = id;
    this.draw();
  }

  async delete(chat) {
    if (!confirm(`Delete “${chat.title}”?`)) return;
    this.deleted.add(chat.id);
    this.chats = this.chats.filter(each => each.id !== chat.id);
    if (chat.id === this.shown) this.open();
    this.draw();
    announce("Deleted");
    byId("anew").focus();
    await deleteChat(chat.id).catch(error => this.showFault(error));
  }

  /** Save the chat that is shown as Markdown. */
  export() {
    const chat = this.chats.find(each => each.id === this.shown);
    const parts = chat.messages.map(({role, model, content, images = []}) => {
      const shown = images.map((url, at) => `![Image ${at + 1}](${url})\n\n`).join("");
      return `## ${role === "user" ? "You" : model || "Assistant"}\n\n${shown}${content}\n`;
    });
    const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "chat";
    download(`${name}.md`, "text/markdown", `# ${chat.title}\n\n${parts.join("\n")}`);
  }

  draw() {
    byId("export").disabled = !this.chats.some(each => each.id === this.shown);
    byId("export-all").disabled = !this.chats.length;
    list.replaceChildren(...this.chats.map(chat => {
      const open = button(chat.title, () => this.open(chat), "title"), remove = button("×", () => this.delete(chat), "small");
      open.title = `${chat.title}\n${new Date(chat.updated).toLocaleString()}`;
      if (chat.id === this.shown) open.setAttribute("aria-current", "true");
      remove.setAttribute("aria-label", `Delete ${chat.title}`);
      return element("li", "", open, remove);
    }));
  }
}
