/** Start the page: a chat over /v1/chat/completions, and plots of /metrics, read each second. */

import {Chats} from "./chats.js";
import {Conversation} from "./conversation.js";
import {byId} from "./dom.js";
import {Images} from "./images.js";
import {drawCharts, PERIOD, takeSample} from "./plots.js";
import {ask, describeServer, Locked} from "./server.js";
import {keep, kept, openSettings} from "./settings.js";

const NARROW = matchMedia("(max-width: 899px)");
let state = "unknown";

const images = new Images();
const conversation = new Conversation(chat => chats.keep(chat), images);
const chats = new Chats(chat => {
  conversation.show(chat);
  chats.select(conversation.chat.id);
  if (NARROW.matches) showView("chat");
});

/** Plots are folded until they are asked for: the chat comes first. */
const isFolded = name => kept.folded?.[name] ?? name === "plots";

/** On a narrow screen one view is shown at a time; on a wide one a button folds its view. */
function showView(name) {
  if (NARROW.matches) document.body.dataset.view = name;
  else keep({folded: {...kept.folded, [name]: !isFolded(name)}});
  drawViews();
}

function drawViews() {
  const {body} = document;
  for (const each of byId("views").children) {
    const {view} = each.dataset;
    if (view !== "chat") body.classList.toggle(`no-${view}`, isFolded(view));
    each.setAttribute("aria-pressed", NARROW.matches ? view === body.dataset.view : !isFolded(view));
  }
  drawCharts();
}

function showState(name) {
  if (name === state) return;
  state = name;
  byId("state").dataset.state = name;
  byId("state").textContent = name === "locked" ? "key refused: reload the page" : name;
}

/** One look at the server. */
async function look() {
  let text = "";
  try {
    const {state: now} = await (await ask("health")).json();
    // it may be another one by now, and names its GPUs once it is ready
    if (["unknown", "unreachable", "loading"].includes(state)) {
      await describeServer(kept.model);
      images.draw();
    }
    showState(now);
    const metrics = await ask("metrics");
    text = metrics.ok ? await metrics.text() : "";
  } catch (error) {
    showState(error instanceof Locked ? "locked" : "unreachable");
  }
  takeSample(text);
  drawCharts();
}

byId("composer").addEventListener("submit", async event => {
  event.preventDefault();
  await images.reading;
  const box = byId("message"), content = box.value;
  if ((content.trim() || images.urls.length) && conversation.send(content, images.urls)) {
    box.value = "";
    images.clear();
  }
});
byId("message").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", () => conversation.stop());
document.addEventListener("keydown", event => { if (event.key === "Escape") conversation.stop(); });
for (const each of byId("views").children) each.addEventListener("click", () => showView(each.dataset.view));
NARROW.addEventListener("change", drawViews);

openSettings();
drawViews();
conversation.show();
chats.select(conversation.chat.id);
await chats.load();
for (let next = performance.now(); state !== "locked";) {
  await look();
  next = Math.max(next + PERIOD * 1000, performance.now());
  await new Promise(resolve => setTimeout(resolve, next - performance.now()));
}
