/** Renders Markdown as DOM nodes, block by block; what it does not know stays text. */

import { copyButton } from "../clipboard.js";
import { h, swap } from "../dom.js";
import { inline } from "./inline.js";
import { items, listEnd, listItem } from "./lists.js";
import { startsTable, table, tableEnd } from "./table.js";

const FENCE = /^(\s*)(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?/;
const DEEPEST = 12; // blocks within blocks; deeper ones are read as paragraphs

/** The kinds of blocks: where one starts, the line after it, and what it becomes. The first that starts is it. */
const KINDS = [
  { starts: (lines, at) => fence(lines[at]) !== null, end: codeEnd, build: code },
  { starts: (lines, at) => HEADING.test(lines[at]), end: (_, at) => at + 1, build: heading },
  { starts: (lines, at) => isRule(lines[at]), end: (_, at) => at + 1, build: () => h("hr") },
  { starts: startsTable, end: tableEnd, build: table },
  { starts: (lines, at) => QUOTE.test(lines[at]), end: quoteEnd, build: quote },
  { starts: (lines, at) => listItem(lines[at]) !== null, end: (lines, at) => listEnd(lines, at, starts), build: list },
];
const PARAGRAPH = { end: paragraphEnd, build: (lines) => h("p", {}, ...inline(lines.join("\n").trim())) };

/** An element whose text grows: blocks that are whole stay the nodes that they are. */
export class Growing {
  #element;
  #blocks = [];

  constructor(element) {
    this.#element = element;
  }

  draw(text) {
    this.#blocks = render(text, this.#blocks);
    swap(this.#element, this.#blocks.map(({ node }) => node));
  }
}

/** The blocks of a whole text, as their source and their node. Those of `before` are taken where they are the same. */
export function render(text, before = [], depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const kind = (depth < DEEPEST && KINDS.find(({ starts }) => starts(lines, at))) || PARAGRAPH;
    const end = kind.end(lines, at);
    const part = lines.slice(at, end);
    const source = part.join("\n");
    const known = before[blocks.length];
    blocks.push(known?.source === source ? known : { source, node: kind.build(part, depth) });
    at = end;
  }
  return blocks;
}

function nodes(lines, depth) {
  return render(lines.join("\n"), [], depth + 1).map(({ node }) => node);
}

function starts(lines, at) {
  return KINDS.some((kind) => kind.starts(lines, at));
}

function paragraphEnd(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && (!starts(lines, end) || isSentence(lines[end]))) end++;
  return end;
}

/** A number within a paragraph that got to the margin is not the beginning of a list. */
function isSentence(line) {
  const item = listItem(line);
  return item !== null && item.ordered && item.number !== 1;
}

/** What opens a code block, or null: its indent, its mark and its language. */
function fence(line) {
  const match = FENCE.exec(line);
  if (!match || match[3].includes("`")) return null;
  return { indent: match[1].length, mark: match[2], language: match[3].trim().split(/\s/)[0] };
}

/** The line after a code block; while its end has not come, it reaches to the end of the text. */
function codeEnd(lines, at) {
  const end = closing(lines, at);
  return end < 0 ? lines.length : end + 1;
}

function closing(lines, at) {
  const { mark } = fence(lines[at]);
  return lines.findIndex((line, index) => index > at && isClosing(line.trim(), mark));
}

function isClosing(line, mark) {
  return line.startsWith(mark) && line === mark[0].repeat(line.length);
}

function code(lines) {
  const { indent, language } = fence(lines[0]);
  const end = closing(lines, 0);
  const spaces = new RegExp(`^\\s{0,${indent}}`);
  const text = lines.slice(1, end < 0 ? undefined : end).map((line) => line.replace(spaces, "")).join("\n");
  const head = h("div", { class: "head" }, h("span", { class: "language" }, language), copyButton("code", () => text));
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", {}, text)));
}

function heading([line]) {
  const [, marks, text] = HEADING.exec(line);
  // A message's name is an h3.
  return h(`h${Math.min(marks.length + 3, 6)}`, {}, ...inline(text.replace(/\s#+$/, "")));
}

function isRule(line) {
  const marks = line.replace(/\s/g, "");
  return marks.length > 2 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function quoteEnd(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return end;
}

function quote(lines, depth) {
  return h("blockquote", {}, ...nodes(lines.map((line) => line.replace(QUOTE, "")), depth));
}

function list(lines, depth) {
  const { ordered, number } = listItem(lines[0]);
  const entries = items(lines).map((part) => h("li", {}, ...itemNodes(part, depth)));
  return h(ordered ? "ol" : "ul", { start: ordered && number !== 1 && String(number) }, ...entries);
}

/** An item's first paragraph stands in the item itself. */
function itemNodes(lines, depth) {
  const [first, ...rest] = nodes(lines, depth);
  if (!first) return [];
  return [...(first.tagName === "P" ? first.childNodes : [first]), ...rest];
}
