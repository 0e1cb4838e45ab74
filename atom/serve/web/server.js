/** Ask the server: its state, its metrics, and answers as they stream. */

import {byId} from "./dom.js";

export class Locked extends Error {}  // the key does not fit any more: each new request would open the browser's dialog

/** The address of a route, below wherever a proxy has put the page, and without a key that the page's own may have. */
const address = route => new URL(route, location.origin + location.pathname);

/** What a route answers within some seconds. */
export async function ask(route) {
  const answer = await fetch(address(route), {cache: "no-store", signal: AbortSignal.timeout(5000)});
  if (answer.status === 401) throw new Locked();
  return answer;
}

/** Show what does not change once a server is ready. wanted: the model to choose, if one has this name. */
export async function describeServer(wanted) {
  const [models, version] = await Promise.all(["v1/models", "version"].map(async route => (await ask(route)).json()));
  const select = byId("model"), chosen = select.value || wanted;
  select.replaceChildren(...models.data.map(makeOption));
  if (models.data.some(each => each.id === chosen)) select.value = chosen;
  const context = `${models.data[0].max_model_len.toLocaleString("en")} tokens`;
  const numbers = [version.weights.join(", "), version.dtype].filter(Boolean).join(" in ");
  const about = [version.model, numbers, context, version.hardware, version.version];
  byId("about").textContent = about.filter(Boolean).join(" · ");
  byId("about").title = byId("about").textContent;
  document.title = `${models.data[0].id} · atom`;
}

function makeOption({id, architecture}) {
  const option = new Option(id);
  option.dataset.images = architecture?.input_modalities.includes("image") ?? false;
  return option;
}

/** The events of an answer to a request of /v1/chat/completions. Throws what a refusal says. */
export async function* complete(request, signal) {
  const response = await fetch(address("v1/chat/completions"), {
    method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(request), signal,
  }).catch(() => { throw new Error("The server cannot be reached."); });
  if (!response.ok) throw new Error(await describeRefusal(response));
  for await (const event of readEvents(response.body)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

/** The JSON objects of a stream of server-sent events. Throws where it ends before it says so. */
async function* readEvents(body) {
  const decoder = new TextDecoder();
  let held = "";
  for (const reader = body.getReader(); ;) {
    const {value, done} = await reader.read().catch(() => ({done: true}));
    if (done) throw new Error("The connection ended before the answer did.");
    const events = (held + decoder.decode(value, {stream: true})).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.split("\n").find(line => line.startsWith("data: "))?.slice(6);  // empty lines have none
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** What a refusal says: the server's own line where it has one. */
async function describeRefusal(answer) {
  const text = await answer.text();
  const wait = answer.headers.get("retry-after");
  let message = text.trim() || answer.statusText;
  try { message = JSON.parse(text).error.message; } catch { /* a proxy's, which is no JSON */ }
  return `${message} (${answer.status}${wait ? `, try again in ${wait} s` : ""})`;
}
