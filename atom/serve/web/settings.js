/** The settings: fields of the request, kept in the browser's localStorage. */

import {byId} from "./dom.js";

const KEY = `atom ${location.pathname}`;
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const form = byId("settings");

/** What was kept; nothing where the browser keeps nothing. */
export const kept = (() => {
  try { return JSON.parse(localStorage.getItem(KEY)) ?? {}; } catch { return {}; }
})();

/** Keep some values beside those that are kept. */
export function keep(values) {
  Object.assign(kept, values);
  try { localStorage.setItem(KEY, JSON.stringify(kept)); } catch { /* the browser keeps nothing */ }
}

/** Fill in the kept fields, and keep them whenever one changes. */
export function openSettings() {
  for (const [name, value] of Object.entries(kept.fields ?? {})) if (form.elements[name]) form.elements[name].value = value;
  byId("model").addEventListener("change", () => keep({model: byId("model").value}));
  byId("open").addEventListener("click", () => showSettings(form.hidden));
  byId("defaults").addEventListener("click", () => { form.reset(); checkMore(); keepFields(); });
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("input", () => { checkMore(); keepFields(); });
}

function keepFields() {
  const named = [...form.elements].filter(each => each.name);
  keep({fields: Object.fromEntries(named.map(each => [each.name, each.value]))});
}

function showSettings(isShown) {
  form.hidden = !isShown;
  byId("open").setAttribute("aria-expanded", isShown);
}

/** Whether the settings can be sent; where not, the field at fault is shown. */
export function checkSettings() {
  checkMore();
  if (form.checkValidity()) return true;
  showSettings(true);
  form.reportValidity();
  return false;
}

function checkMore() {
  const area = form.elements.more;
  let fault = "";
  try {
    const value = JSON.parse(area.value.trim() || "{}");
    if (typeof value !== "object" || value === null || Array.isArray(value)) fault = "This is no JSON object.";
    else if (value.n > 1) fault = "The page shows one answer: leave n out.";
  } catch (error) {
    fault = `This is no JSON: ${error.message}`;
  }
  area.setCustomValidity(fault);
}

/** The request of a conversation. A field that is left empty is the server's to choose. */
export function makeRequest(messages) {
  const fields = form.elements, request = {model: byId("model").value || undefined};
  for (const name of NUMBERS) if (fields[name].value !== "") request[name] = fields[name].valueAsNumber;
  const stop = fields.stop.value.split("\n").filter(Boolean).map(each => each.replaceAll("\\n", "\n"));
  if (stop.length) request.stop = stop;
  const system = fields.system.value.trim() ? [{role: "system", content: fields.system.value}] : [];
  const more = fields.more.value.trim() ? JSON.parse(fields.more.value) : {};
  Object.assign(request, more, {messages: [...system, ...messages]});
  return {...request, stream: true, stream_options: {include_usage: true}, return_token_ids: true};
}
