/** A message on the screen: text, reasoning, tool calls, what it cost, and what can be done with it. */

import {button, copyButton, element} from "./dom.js";
import {count, seconds, tokens} from "./format.js";
import {makeImage} from "./images.js";
import {renderMarkdown} from "./markdown.js";

/**
 * The article of a message; `draw` shows what the message holds by now.
 *
 * actions: labels of buttons -> what they do.
 */
export function makeArticle(message, actions) {
  const isAnswer = message.role === "assistant", label = isAnswer ? message.model || "Assistant" : "You";
  const [thoughts, text, calls] = [element("div", "text md"), element("div", `text${isAnswer ? " md" : ""}`), element("div")];
  const [meta, error] = [element("p", "meta"), element("p", "error")];
  const images = element("div", "images", ...(message.images ?? []).map((url, at) => makeImage(url, at + 1)));
  const fold = element("details", "thoughts", element("summary"), thoughts);
  const tools = element("div", "tools", copyButton(() => message.content));
  const article = element("article", message.role, element("p", "label", label), images, fold, text, calls, meta, error, tools);
  const buttons = Object.fromEntries(Object.entries(actions).map(([name, act]) => [name, button(name, act, "small")]));
  tools.append(...Object.values(buttons));
  tools.setAttribute("role", "group");
  tools.setAttribute("aria-label", isAnswer ? "Answer" : "Message");
  article.setAttribute("aria-label", label);
  error.setAttribute("role", "alert");
  images.hidden = !message.images?.length;

  function draw() {
    const {reasoning = "", content, isBusy = false} = message;
    article.setAttribute("aria-busy", isBusy);
    article.classList.toggle("busy", isBusy);
    fold.hidden = !reasoning;
    fold.firstChild.textContent = isBusy && !content ? "Reasoning …" : "Reasoning";
    if (fold.open) renderMarkdown(thoughts, reasoning);
    if (isAnswer) renderMarkdown(text, content);
    else text.textContent = content;
    text.hidden = !isAnswer && !content;
    calls.replaceChildren(...(message.calls ?? []).map(({function: call}) => element("pre", "call", `${call.name}(${call.arguments})`)));
    meta.textContent = message.meta ?? "";
    error.textContent = message.error ?? "";
    error.hidden = !message.error;
    tools.hidden = isBusy;
  }

  fold.addEventListener("toggle", () => { if (fold.open) renderMarkdown(thoughts, message.reasoning ?? ""); });
  draw();
  return {article, text, tools, buttons, draw};
}

/** Put a field in place of a message's text; `done` is called with what it holds, or with null where nothing is to change. */
export function editInPlace({text, tools}, {content, images = []}, done) {
  const area = element("textarea", "edit"), form = element("form", "editing");
  const send = element("button", "main small", "Send");
  const end = value => { form.remove(); text.hidden = !content; tools.hidden = false; done(value); };
  area.value = content;
  area.setAttribute("aria-label", "Edit message");
  form.append(area, element("div", "tools", send, button("Cancel", () => end(null), "small")));
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (area.value.trim() || images.length) end(area.value);
  });
  area.addEventListener("keydown", event => {
    if (event.key === "Escape") { event.stopPropagation(); end(null); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  text.hidden = tools.hidden = true;
  text.after(form);
  area.focus();
}

/** Take one event of a stream into an answer. */
export function takeEvent(answer, event) {
  if (event.usage) answer.usage = event.usage;
  const choice = event.choices[0];
  if (!choice) return;
  answer.content += choice.delta.content ?? "";
  answer.reasoning += choice.delta.reasoning_content ?? "";
  for (const {index, id, function: part} of choice.delta.tool_calls ?? []) {
    const call = answer.calls[index] ??= {id, type: "function", function: {name: "", arguments: ""}};
    call.function.name += part.name ?? "";
    call.function.arguments += part.arguments ?? "";
  }
  answer.finish = choice.finish_reason ?? answer.finish;
}

/** What an answer has cost. */
export function describeUsage({usage, finish}) {
  const first = Number.isFinite(usage.ttft_s) ? `TTFT ${seconds(usage.ttft_s)}` : "";
  const rate = usage.tpot_s > 0 ? `${count(1 / usage.tpot_s)} tokens/s` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const prompt = `prompt ${usage.prompt_tokens}${cached ? `, ${cached} of them cached` : ""}`;
  const cut = {length: "cut at the limit", repetition: "cut, since it repeats itself"}[finish];
  return [first, rate, tokens(usage.completion_tokens), cut, prompt].filter(Boolean).join(" · ");
}

/** Count the tokens of a stream, and say how fast they come. */
export class Pace {
  number = 0;
  first = null;  // when the first ones came, and how many

  take(event) {
    const more = event.choices[0]?.token_ids?.length ?? 0;
    if (!more) return;
    this.number += more;
    this.first ??= {time: performance.now(), number: more};
  }

  toString() {
    if (!this.first) return "waiting for the first token";
    const passed = (performance.now() - this.first.time) / 1000;
    const rate = passed > 0 ? (this.number - this.first.number) / passed : 0;
    return `${tokens(this.number)}${rate ? ` · ${count(rate)} tokens/s` : ""}`;
  }
}
