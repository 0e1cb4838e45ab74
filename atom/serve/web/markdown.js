/**
 * Render Markdown as DOM nodes, with marked and DOMPurify (vendor/). HTML in the text stays text, images become links.
 *
 *     renderMarkdown(element, text)     // again whenever the text has grown: finished blocks are not parsed anew
 *
 * Text that is nested too deep, or very long, is shown as it is.
 */

import {copyButton, element} from "./dom.js";
import {Lexer, Marked} from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";  // defines DOMPurify

const MAX_DEPTH = 8;  // lists and quotes in each other, and emphasis
const MAX_LENGTH = 200_000;  // characters of a text
const MAX_INLINE = 10_000;  // characters of a paragraph whose inline text is parsed
const ADDRESS = /^(?:https?|mailto):/i;
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "#text",
  ],
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "type"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: ADDRESS,
  RETURN_DOM_FRAGMENT: true,
  ADD_URI_SAFE_ATTR: ["align", "checked", "disabled", "start", "type"],  // all others have to be addresses
};
const drawn = new WeakMap();  // element -> the blocks that it shows, as {raw, token}

/** Show a text in an element. */
export function renderMarkdown(target, text) {
  const old = drawn.get(target) ?? [], blocks = splitBlocks(text.replace(/\r\n?/g, "\n"), old);
  const changed = [];
  blocks.forEach((block, index) => {
    const before = old[index];
    if (before?.raw === block.raw) return;
    if (isCode(before) && isCode(block) && before.token.lang === block.token.lang) {  // its button may have the focus
      target.childNodes[index].querySelector("code").textContent = withoutEnd(block.token.text);
    } else {
      changed.push(index);
    }
  });
  const made = build(changed.map(index => blocks[index].token));
  changed.forEach((index, which) => {
    const shown = target.childNodes[index];
    shown ? shown.replaceWith(made[which]) : target.append(made[which]);
  });
  while (target.childNodes.length > blocks.length) target.lastChild.remove();
  drawn.set(target, blocks);
}

const isCode = block => block?.token.type === "code";

/** The blocks of a text, of which the ones that it begins with are known. */
function splitBlocks(text, known) {
  if (text.length > MAX_LENGTH) return [{raw: text, token: {type: "text", raw: text, text}}];
  const blocks = [];
  let at = 0;
  for (const block of known.slice(0, known.slice(0, -2).findLastIndex(({raw}) => raw.endsWith("\n\n")) + 1)) {
    if (!text.startsWith(block.raw, at)) break;
    blocks.push(block);
    at += block.raw.length;
  }
  for (const token of new BoundedLexer(marked.defaults).lex(text.slice(at))) {
    if (token.type !== "space") blocks.push({raw: token.raw, token});
    else if (blocks.length) blocks[blocks.length - 1] = {...blocks.at(-1), raw: blocks.at(-1).raw + token.raw};
  }
  return blocks;
}

/** A lexer that takes what is nested too deep, or too long, for plain text. */
class BoundedLexer extends Lexer {
  depth = 0;

  blockTokens(text, tokens = [], ...more) {
    return this.bound(text, tokens, MAX_LENGTH, () => super.blockTokens(text, tokens, ...more));
  }

  inlineTokens(text, tokens = []) {
    return this.bound(text, tokens, MAX_INLINE, () => super.inlineTokens(text, tokens));
  }

  bound(text, tokens, maxLength, lex) {
    if (text.length > maxLength || this.depth > MAX_DEPTH) {
      tokens.push({type: "text", raw: text, text});
    } else {
      this.depth++;
      lex();
      this.depth--;
    }
    return tokens;
  }
}

const none = () => undefined;  // what is not taken by a rule stays text
const marked = new Marked({
  tokenizer: {html: none, tag: none, def: none},  // def: it would change what was drawn before it
  renderer: {
    link({href, raw, tokens}) {
      if (!isAddress(href)) return escape(raw);
      const inside = tokens.map(each => each.type === "image" ? {type: "text", raw: each.raw, text: each.text} : each);
      return `<a href="${escape(href)}">${this.parser.parseInline(inside)}</a>`;
    },
    image({href, raw, text}) {
      return isAddress(href) ? `<a href="${escape(href)}">${escape(text || href)}</a>` : escape(raw);
    },
  },
});

const withoutEnd = text => text.replace(/\n$/, "");
const isAddress = href => ADDRESS.test(href) && URL.canParse(href);
const escape = text => text.replace(/[&<>"]/g, sign => `&#${sign.charCodeAt(0)};`);

/** A node for each block. */
function build(tokens) {
  if (!tokens.length) return [];
  const fragment = sanitize(tokens.map(token => `<div>${marked.parser([token])}</div>`).join(""));
  for (const each of fragment.querySelectorAll("a")) {  // a link opens elsewhere, and the site is not sent where it was
    Object.assign(each, {title: each.href, target: "_blank", rel: "noopener noreferrer nofollow"});
  }
  for (const each of fragment.querySelectorAll("pre")) each.replaceWith(buildCode(each.firstChild));
  for (const each of fragment.querySelectorAll("table")) {
    const scrolled = element("div", "table");
    scrolled.tabIndex = 0;
    each.replaceWith(scrolled);
    scrolled.append(each);
  }
  for (const each of fragment.querySelectorAll("li > :is(p, ul, ol, blockquote, div)")) {
    if (each.nextSibling?.data) each.nextSibling.data = each.nextSibling.data.trimStart();  // an item shows its line breaks
  }
  return Array.from(fragment.children, (each, index) => each.firstElementChild ?? element("div", "plain", tokens[index].raw));
}

/** HTML as nodes, with nothing in it but what Markdown makes. */
export function sanitize(html) {
  return DOMPurify.sanitize(html, ALLOWED);
}

function buildCode(code) {
  const language = code.className.replace("language-", ""), text = element("pre", "", code);
  code.removeAttribute("class");
  code.textContent = withoutEnd(code.textContent);
  text.tabIndex = 0;  // it scrolls
  const head = element("div", "head", element("span", "", language), copyButton(() => code.textContent));
  return element("div", "code", head, text);
}
