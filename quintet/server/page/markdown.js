/** Renders a small part of Markdown as DOM nodes: code, headings, lists, quotes, bold, italics. Links stay text. */

import { h } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;

/** The nodes for a whole text. It may still be growing: an open code block reaches to the end. */
export function render(text) {
  const lines = text.split("\n");
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    const [node, next] = block(lines, at);
    if (node) nodes.push(node);
    at = next;
  }
  return nodes;
}

/** The block that begins at a line, and the line after it. */
function block(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  // A message's name is an h3.
  if (heading) return [h(`h${Math.min(heading[1].length + 3, 6)}`, {}, ...inline(heading[2])), at + 1];
  if (ITEM.test(line)) return list(lines, at);
  if (QUOTE.test(line)) return quote(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end++;
  return [h("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

function starts(line) {
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || QUOTE.test(line);
}

function code(lines, at, [, mark, language]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && FENCE.test(lines[end]))) end++;
  const text = h("code", {}, lines.slice(at + 1, end).join("\n"));
  const label = language ? [h("span", { class: "language" }, language)] : [];
  return [h("div", { class: "code" }, ...label, h("pre", { tabindex: "0" }, text)), end + 1];
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => QUOTE.exec(line)[1]);
  return [h("blockquote", {}, ...inline(inner.join("\n"))), end];
}

/** A list and the deeper lists within it. */
function list(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const node = h(ordered ? "ol" : "ul", { start: ordered && parseInt(mark, 10) !== 1 && parseInt(mark, 10) });
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length < indent.length) break;
    if (item[1].length > indent.length && node.lastChild) {
      const [inner, next] = list(lines, at);
      node.lastChild.append(inner);
      at = next;
    } else if (/\d/.test(item[2]) === ordered) {
      node.append(h("li", {}, ...inline(item[3])));
      at++;
    } else break;
  }
  return [node, at];
}

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(at, match.index));
    if (match[1] !== undefined) nodes.push(h("code", {}, match[1]));
    else if (match[2] !== undefined) nodes.push(h("strong", {}, match[2]));
    else nodes.push(h("em", {}, match[3]));
    at = match.index + match[0].length;
  }
  return [...nodes, text.slice(at)];
}
