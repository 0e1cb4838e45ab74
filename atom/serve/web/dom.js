/** Make DOM nodes: strings become text, never HTML. */

export const byId = id => document.getElementById(id);

/** An element with a class and children. */
export function element(tag, name = "", ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children);
  return made;
}

/** A button that acts when it is pressed. */
export function button(label, act, name = "") {
  const made = element("button", name, label);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

/** A button that copies a text, and says so. */
export function copyButton(read) {
  const made = button("Copy", async () => {
    made.textContent = await copy(read()) ? "Copied" : "Not allowed";
    announce(made.textContent);
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  }, "small");
  return made;
}

/** Whether a text was copied; over plain HTTP browsers have only the old way. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = element("textarea", "unseen"), focused = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}

/** Let a screen reader say a text. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Let the browser save a text as a file. */
export function download(name, type, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
