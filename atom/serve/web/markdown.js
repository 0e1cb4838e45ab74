/**
 * Render Markdown as DOM nodes: headings, lists, tables, quotes, code. HTML stays text.
 *
 *     renderMarkdown(element, text)     // again whenever the text has grown: blocks that are as they were stay
 *
 * Text that is nested too deep, or very long, is shown as it is.
 */

import {copyButton, element} from "./dom.js";
import {renderInline} from "./inline.js";

const DEEPEST = 8;  // lists and quotes in each other
const LONGEST = 200_000;  // characters
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*(?:\|[ \t]*)?$/;
const TASK = /^\[([ xX])\] /;
const isBlank = line => line === undefined || !line.trim();
const indentOf = line => line.length - line.trimStart().length;

/** Show a text in an element. */
export function renderMarkdown(target, text) {
  const isPlain = text.length > LONGEST;
  const blocks = isPlain ? [{kind: "plain", lines: [text]}] : splitBlocks(text.replace(/\r\n?/g, "\n").split("\n").map(expandTabs));
  blocks.forEach((block, index) => {
    const shown = target.childNodes[index], source = `${block.kind}\n${block.lines.join("\n")}`;
    if (shown?.source === source) return;
    if (block.kind === "code" && shown?.language === block.language) {  // it grows, and its button may have the focus
      shown.querySelector("code").textContent = block.lines.join("\n");
    } else {
      const made = build(block, 0);
      made.language = block.language;
      shown ? shown.replaceWith(made) : target.append(made);
    }
    target.childNodes[index].source = source;
  });
  while (target.childNodes.length > blocks.length) target.lastChild.remove();
}

const expandTabs = line => line.replace(/^[ \t]*\t/, found => found.replaceAll("\t", "    "));

/** The blocks of some lines: each with its kind and the lines in it, without the block's own marks. */
function splitBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) { at++; continue; }
    const take = [takeCode, takeHeading, takeRule, takeQuote, takeList, takeTable, takeParagraph];
    for (const each of take) {
      const found = each(lines, at);
      if (!found) continue;
      blocks.push(found.block);
      at = found.end;
      break;
    }
  }
  return blocks;
}

function takeCode(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]) ?? [];
  if (!fence) return null;
  const indent = indentOf(lines[at]), inside = [];
  let end = at + 1;
  for (; end < lines.length && !closes(lines[end], fence); end++) inside.push(dedent(lines[end], indent));
  return {block: {kind: "code", language: info.trim().split(/\s/)[0], lines: inside}, end: end + 1};
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && indentOf(line) < 4 && text === fence[0].repeat(text.length);
}

function takeHeading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const text = lines[at].slice(found[0].length).trim().replace(/(?:^|[ \t])#+$/, "");
  return {block: {kind: `h${found[1].length}`, lines: [text.trim()]}, end: at + 1};
}

function takeRule(lines, at) {
  return RULE.test(lines[at]) ? {block: {kind: "hr", lines: []}, end: at + 1} : null;
}

function takeQuote(lines, at) {
  if (!QUOTE.test(lines[at])) return null;
  const inside = [];
  let end = at;
  for (; end < lines.length && QUOTE.test(lines[end]); end++) inside.push(lines[end].replace(QUOTE, ""));
  return {block: {kind: "blockquote", lines: inside}, end};
}

/** A list: items are indented alike, and what is in them deeper. */
function takeList(lines, at) {
  const first = startOfItem(lines[at]);
  if (!first) return null;
  const items = [];
  let end = at, item = null, isLoose = false;
  for (; end < lines.length; end++) {
    const line = lines[end], start = startOfItem(line);
    if (isBlank(line)) {
      const next = lines.slice(end + 1, end + 9).find(each => !isBlank(each));
      if (next === undefined || !(startOfItem(next)?.kind === first.kind || indentOf(next) >= 2)) break;
      item.lines.push("");
      isLoose ||= indentOf(next) < item.inner || !startOfItem(dedent(next, item.inner));
    } else if (item && indentOf(line) >= Math.min(item.inner, item.outer + 2)) {
      item.lines.push(dedent(line, item.inner));
    } else if (start && start.kind === first.kind && !RULE.test(line)) {
      item = {...start, lines: [line.slice(start.inner)]};
      items.push(item);
    } else if (isBlank(lines[end - 1]) || beginsBlock(lines, end)) {
      break;
    } else {
      item.lines.push(line);
    }
  }
  const inside = lines.slice(at, end);
  return {block: {kind: first.kind, start: first.number, items, isLoose, lines: inside}, end};
}

function startOfItem(line) {
  const [, indent, mark, space] = ITEM.exec(line) ?? [];
  if (mark === undefined) return null;
  const number = parseInt(mark);
  const inner = Math.min(line.length, indent.length + mark.length + (space.length > 4 ? 1 : space.length || 1));
  return {kind: Number.isNaN(number) ? "ul" : "ol", number, outer: indent.length, inner};
}

const dedent = (line, width) => line.slice(Math.min(width, indentOf(line)));

function takeTable(lines, at) {
  if (!lines[at].includes("|") || !DELIMITERS.test(lines[at + 1] ?? "")) return null;
  const marks = cellsOf(lines[at + 1]), head = cellsOf(lines[at]);
  if (marks.length !== head.length) return null;
  const sides = marks.map(mark => mark.endsWith(":") ? mark.startsWith(":") ? "center" : "right" : "left");
  let end = at + 2;
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines, end)) end++;
  const rows = lines.slice(at + 2, end).map(line => head.map((_, index) => cellsOf(line)[index] ?? ""));
  return {block: {kind: "table", head, rows, sides, lines: lines.slice(at, end)}, end};
}

function cellsOf(line) {
  const text = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return text.split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function takeParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines, end)) end++;
  return {block: {kind: "p", lines: lines.slice(at, end)}, end};
}

/** Whether a line ends the paragraph before it. */
function beginsBlock(lines, at) {
  const line = lines[at], item = startOfItem(line);
  if (item && !isBlank(line.slice(item.inner)) && (item.kind === "ul" || item.number === 1)) return true;
  return [FENCE, HEADING, RULE, QUOTE].some(each => each.test(line)) || takeTable(lines.slice(at, at + 2), 0) !== null;
}

function build(block, depth) {
  const {kind, lines} = block;
  if (kind === "plain") return element("div", "plain", lines[0]);
  if (kind === "code") return buildCode(block);
  if (kind === "table") return buildTable(block);
  if (depth >= DEEPEST) return element("div", "plain", lines.join("\n"));
  const made = element(kind);
  if (kind === "ul" || kind === "ol") {
    if (kind === "ol" && block.start !== 1) made.start = block.start;
    made.append(...block.items.map(item => buildItem(item, block.isLoose, depth + 1)));
  } else if (kind === "blockquote") {
    for (const each of splitBlocks(lines)) made.append(build(each, depth + 1));
  } else {
    renderInline(made, lines.map(line => line.trimStart()).join("\n").trimEnd().replace(/(?<! ) {2,}\n/g, "\\\n"));
  }
  return made;
}

function buildItem(item, isLoose, depth) {
  const made = element("li"), [, done] = TASK.exec(item.lines[0]) ?? [];
  if (done !== undefined) {
    const box = element("input");
    Object.assign(box, {type: "checkbox", checked: done !== " ", disabled: true});
    made.append(box, " ");
  }
  const lines = done === undefined ? item.lines : [item.lines[0].replace(TASK, ""), ...item.lines.slice(1)];
  for (const block of splitBlocks(lines)) {
    const inner = build(block, depth);
    if (block.kind !== "p" || isLoose) made.append(inner);
    else while (inner.firstChild) made.append(inner.firstChild);
  }
  return made;
}

function buildCode({language, lines}) {
  const code = element("code", "", lines.join("\n")), text = element("pre", "", code);
  text.tabIndex = 0;  // it scrolls
  const head = element("div", "head", element("span", "", language), copyButton(() => code.textContent));
  return element("div", "code", head, text);
}

function buildTable({head, rows, sides}) {
  const cell = tag => (text, index) => {
    const made = element(tag, sides[index]);
    renderInline(made, text);
    return made;
  };
  const top = element("thead", "", element("tr", "", ...head.map(cell("th"))));
  const body = element("tbody");
  for (const row of rows) body.append(element("tr", "", ...row.map(cell("td"))));
  const made = element("div", "table", element("table", "", top, body));
  made.tabIndex = 0;
  return made;
}
