/**
 * Render Markdown within a line: code, emphasis, links, line breaks.
 *
 * One pass over the text, with bounded looks ahead. What is not closed stays text, as does HTML. Nothing is loaded:
 * an image becomes a link.
 */

import {element} from "./dom.js";

const DEEPEST = 12;  // elements open at a time
const SCHEMES = ["http:", "https:", "mailto:"];
const LINK = /!?\[((?:\\.|[^\[\]\\]){0,500})\]\([ \t]{0,99}(?:<([^<>\n]{0,2000})>|([^\s()<>]{0,2000}(?:\([^\s()]{0,500}\)[^\s()]{0,500})?))(?:[ \t]{1,99}"[^"]{0,500}")?[ \t]{0,99}\)/y;
const ADDRESS = /<((?:https?:|mailto:)[^\s<>]{1,2000})>/y;
const BARE = /https?:\/\/[^\s<>"'`*|\\]{1,2000}/y;
const TAGS = {"*": "em", "_": "em", "**": "strong", "__": "strong", "~~": "del"};
const isSpace = character => character === undefined || /\s/.test(character);
const isWord = character => character !== undefined && /[\p{L}\p{N}_]/u.test(character);

/** Append the nodes of a text. */
export function renderInline(target, text, isInLink = false) {
  const open = [{node: target, mark: ""}], unclosed = new Set();
  let plain = "", at = 0;
  const flush = () => { if (plain) open.at(-1).node.append(plain); plain = ""; };
  const add = node => { flush(); open.at(-1).node.append(node); };
  const match = pattern => { pattern.lastIndex = at; return pattern.exec(text); };

  /** End the innermost element, or make it text again. */
  function pop(isClosed) {
    flush();
    const {node, mark} = open.pop();
    if (isClosed) return;
    node.before(mark);
    while (node.firstChild) node.before(node.firstChild);
    node.remove();
  }

  /** Take a run of *, _ or ~: it closes what is open, then opens. */
  function takeMarks(sign, length) {
    const before = text[at - 1], after = text[at + length];
    const isInner = sign === "_" && isWord(before) && isWord(after);
    const canClose = !isSpace(before) && !isInner && !(sign === "_" && isWord(after));
    const canOpen = !isSpace(after) && !isInner && !(sign === "_" && isWord(before)) && !(isPunctuation(after) && isWord(before));
    let left = length;
    while (canClose && left) {
      const found = open.findLastIndex(each => each.mark[0] === sign && each.mark.length <= left);
      if (found < 0 || (found === open.length - 1 && !plain && !open[found].node.firstChild)) break;
      while (open.length - 1 > found) pop(false);
      left -= open[found].mark.length;
      pop(true);
    }
    while (canOpen && left && open.length < DEEPEST) {
      const mark = sign.repeat(left % 2 || sign === "~" && left < 2 ? 1 : 2), tag = TAGS[mark];
      if (!tag) break;
      const node = element(tag);
      add(node);
      open.push({node, mark});
      left -= mark.length;
    }
    plain += sign.repeat(left);
    at += length;
  }

  /** Take code between runs of as many backticks. */
  function takeCode(length) {
    const fence = "`".repeat(length);
    let end = unclosed.has(length) ? -1 : text.indexOf(fence, at + length);
    while (end >= 0 && (text[end - 1] === "`" || text[end + length] === "`")) {
      while (text[end] === "`") end++;
      end = text.indexOf(fence, end);
    }
    if (end < 0) {
      unclosed.add(length);  // so that no later run looks for it
      plain += fence;
      at += length;
      return;
    }
    const code = text.slice(at + length, end).replaceAll("\n", " ");
    add(element("code", "", code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code));
    at = end + length;
  }

  function takeLink(found, label, href) {
    const link = isInLink ? null : makeLink(href);
    if (link && label) renderInline(link, label, true);
    else link?.append(href);
    if (link) add(link);
    else plain += found[0];
    at += found[0].length;
  }

  while (at < text.length) {
    const sign = text[at];
    let found = null;
    if (sign === "\\" && isPunctuation(text[at + 1])) { plain += text[at + 1]; at += 2; }
    else if (sign === "\\" && text[at + 1] === "\n") { add(element("br")); at += 2; }
    else if (sign === "`") takeCode(runLength(text, at));
    else if ("*_~".includes(sign)) takeMarks(sign, runLength(text, at));
    else if ((sign === "[" || sign === "!") && (found = match(LINK))) takeLink(found, found[1], unescape(found[2] ?? found[3]));
    else if (sign === "<" && (found = match(ADDRESS))) takeLink(found, "", found[1]);
    else if (sign === "h" && !isWord(text[at - 1]) && (found = match(BARE))) {
      found[0] = found[0].slice(0, lengthOfAddress(found[0]));
      takeLink(found, "", found[0]);
    } else { plain += sign; at++; }
  }
  while (open.length > 1) pop(false);
  flush();
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end++;
  return end - at;
}

const isPunctuation = character => character !== undefined && /[!-/:-@[-`{-~]/.test(character);
const unescape = text => text.replace(/\\([!-/:-@[-`{-~])/g, "$1");

/** How much of what looks like an address is one: not the sentence's punctuation, nor a bracket around it. */
function lengthOfAddress(text) {
  let end = text.length;
  while (end && (/[.,:;!?\]}_~]/.test(text[end - 1]) || (text[end - 1] === ")" && !text.slice(0, end).includes("(")))) end--;
  return end;
}

/** A link that opens elsewhere and tells nobody where it was; null for an address that is none, or runs a script. */
function makeLink(href) {
  if (!URL.canParse(href) || !SCHEMES.includes(new URL(href).protocol)) return null;
  const link = element("a");
  Object.assign(link, {href, title: href, target: "_blank", rel: "noopener noreferrer nofollow"});
  return link;
}
