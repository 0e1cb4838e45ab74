/** The conversation that is shown: send, stop, edit, regenerate, continue. */

import {announce, button, byId, element} from "./dom.js";
import {describeUsage, editInPlace, makeArticle, Pace, takeEvent} from "./message.js";
import {complete} from "./server.js";
import {checkSettings, makeRequest} from "./settings.js";

const EXAMPLES = [
  "Explain how a transformer predicts the next word, in three sentences.",
  "Write a Python function that checks whether a text is a palindrome, with tests.",
  "Compare TCP and UDP in a table.",
  "Suggest a dinner from rice, eggs and whatever is left in a fridge.",
];
const SAVE_PERIOD = 2000;  // ms between two savings of an answer that is on its way
const log = byId("log"), box = byId("message");

export class Conversation {
  chat = newChat();
  views = [];
  stopping = null;  // the AbortController of the answer that is on its way

  /** onChange: is called with a chat whenever it is to be kept. images: of the message that is typed. */
  constructor(onChange, images) {
    this.onChange = onChange;
    this.images = images;
  }

  /** Show a chat, or a new one; an answer on its way ends. */
  show(chat = newChat()) {
    this.stop();
    this.stopping = null;
    this.chat = chat;
    this.draw();
    this.drawBusy();
    log.scrollTop = log.scrollHeight;
    box.focus();
  }

  stop() {
    this.stopping?.abort();
  }

  draw() {
    this.views = [];
    log.replaceChildren(...(this.chat.messages.length ? [] : [this.makeHint()]));
    for (const message of this.chat.messages) this.add(message);
    this.drawActions();
  }

  makeHint() {
    const keys = element("p", "", "Enter sends, Shift+Enter begins a new line, Escape stops an answer.");
    const examples = element("ul", "examples");
    for (const text of EXAMPLES) examples.append(element("li", "", button(text, () => this.send(text))));
    const hint = element("div", "", element("h2", "", "Ask something"), keys, examples);
    hint.id = "hint";
    return hint;
  }

  add(message) {
    byId("hint")?.remove();
    const actions = message.role === "user"
      ? {Edit: () => this.edit(message)}
      : {Regenerate: () => this.regenerate(message), Continue: () => this.continue(message)};
    const view = makeArticle(message, actions);
    this.views.push(view);
    log.append(view.article);
    return view;
  }

  /** Only the last answer is made anew or goes on; nothing is edited while one is on its way. */
  drawActions() {
    this.views.forEach(({buttons}, index) => {
      const message = this.chat.messages[index], isLast = index === this.views.length - 1 && !this.stopping;
      if (buttons.Edit) buttons.Edit.hidden = this.stopping !== null;
      if (buttons.Regenerate) buttons.Regenerate.hidden = !isLast;
      if (buttons.Continue) buttons.Continue.hidden = !isLast || !message?.content || message.finish === "stop" || message.calls.length > 0;
    });
  }

  /** Send a message. False where the settings are at fault, or an answer is on its way. */
  send(content, images = []) {
    const message = {role: "user", content, ...(images.length ? {images} : {})};
    return this.ask([...this.chat.messages, message], message);
  }

  edit(message) {
    const index = this.chat.messages.indexOf(message), view = this.views[index];
    editInPlace(view, message, content => {
      if (content === null) view.buttons.Edit.focus();
      else this.ask([...this.chat.messages.slice(0, index), {...message, content}]);
    });
  }

  regenerate(message) {
    this.ask(this.chat.messages.slice(0, this.chat.messages.indexOf(message)));
  }

  continue(message) {
    this.ask(this.chat.messages.slice(0, -1), null, message);
  }

  /**
   * Let the model answer some messages. Where nothing comes, the chat is as it was.
   *
   * typed: the message that goes back to where it was typed then. begun: the answer that is to go on.
   */
  ask(messages, typed = null, begun = null) {
    if (this.stopping || !checkSettings()) return false;
    this.answer(messages, typed, begun);
    return true;
  }

  async answer(messages, typed, begun) {
    const chat = this.chat, before = chat.messages, stopping = this.stopping = new AbortController();
    const started = begun ?? {content: "", reasoning: "", calls: []};
    const answer = {role: "assistant", ...started, model: byId("model").value, finish: null, error: "", usage: null, isBusy: true};
    chat.messages = [...messages, answer];
    chat.title ||= titleOf(messages);
    this.draw();
    if (document.activeElement === document.body) log.focus({preventScroll: true});  // the button that was pressed is gone
    const view = this.views.at(-1), pace = new Pace();
    log.scrollTop = log.scrollHeight;
    this.drawBusy();
    announce("Answering");
    const keep = () => this.onChange({...chat, updated: Date.now(), messages: chat.messages.map(stored)});
    const saving = setInterval(keep, SAVE_PERIOD);
    let wanted = 0;
    const drawSoon = () => {
      cancelAnimationFrame(wanted);
      wanted = requestAnimationFrame(() => { answer.meta = `${pace}`; drawAtEnd(view); });
    };
    drawSoon();
    try {
      for await (const event of complete(requestOf(messages, begun), stopping.signal)) {
        pace.take(event);
        takeEvent(answer, event);
        drawSoon();
      }
      answer.meta = describeUsage(answer);
    } catch (error) {
      answer.meta = "";
      if (stopping.signal.aborted) answer.meta = "stopped";
      else answer.error = error.message;
    }
    cancelAnimationFrame(wanted);
    clearInterval(saving);
    answer.isBusy = false;
    const isEmpty = answer.content === started.content && answer.reasoning === started.reasoning && !answer.calls.length && !answer.usage;
    if (isEmpty) chat.messages = before;
    if (before.length || !isEmpty) keep();
    if (this.stopping !== stopping) return;  // another chat is shown
    this.stopping = null;
    this.drawBusy();
    if (isEmpty) {
      this.draw();
      this.showFailure(answer.error || "Stopped before an answer came.");
      if (typed && !box.value && !this.images.urls.length) {  // to be mended and sent again
        box.value = typed.content;
        this.images.set(typed.images ?? []);
      }
      return;
    }
    drawAtEnd(view);
    this.drawActions();
    announce(answer.error ? "" : `${answer.meta === "stopped" ? "Stopped. " : ""}${answer.content}`);
  }

  showFailure(text) {
    const line = element("p", "error", text);
    line.setAttribute("role", "alert");
    log.append(line);
    log.scrollTop = log.scrollHeight;
  }

  drawBusy() {
    const [shown, gone] = this.stopping ? [byId("stop"), byId("send")] : [byId("send"), byId("stop")];
    const hadFocus = document.activeElement === gone;
    shown.hidden = false;
    gone.hidden = true;
    if (hadFocus) shown.focus();
    this.drawActions();
  }
}

const newChat = () => ({id: newId(), title: "", created: Date.now(), updated: Date.now(), messages: []});
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), byte => byte.toString(16).padStart(2, "0")).join("");
const titleOf = messages => messages[0].content.trim().split("\n")[0].slice(0, 80) || "Image";
const stored = ({isBusy, usage, ...message}) => isBusy ? {...message, meta: "", error: "The page was left before the answer ended."} : message;

/** The messages of a request; an answer that is to go on is the last one. */
function requestOf(messages, begun) {
  const sent = [...messages, ...(begun ? [begun] : [])].map(({role, content, images, calls}) => {
    const made = calls?.length ? {tool_calls: calls} : {};
    return {role, content: images ? partsOf(content, images) : content, ...made};
  });
  const request = makeRequest(sent);
  return begun ? {...request, add_generation_prompt: false, continue_final_message: true} : request;
}

/** The content of a message with images, which come before its text. */
function partsOf(text, images) {
  const parts = images.map(url => ({type: "image_url", image_url: {url}}));
  return text.trim() ? [...parts, {type: "text", text}] : parts;
}

/** Draw a message; whoever reads its end goes on reading there. */
function drawAtEnd(view) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  view.draw();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}
