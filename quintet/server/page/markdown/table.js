/** Renders Markdown tables, as GitHub has them. */

import { h } from "../dom.js";
import { inline } from "./inline.js";

const BAR = /(?<!\\)\|/;
const DELIMITER = /^(:?)-+(:?)$/;

/** Whether a row of names and a row of dashes, as many of them, stand at a line. */
export function startsTable(lines, at) {
  if (!BAR.test(lines[at]) || !lines[at + 1]?.includes("-")) return false;
  const marks = cells(lines[at + 1]);
  return marks.every((mark) => DELIMITER.test(mark)) && marks.length === cells(lines[at]).length;
}

export function tableEnd(lines, at) {
  let end = at + 2;
  while (end < lines.length && BAR.test(lines[end])) end++;
  return end;
}

/** Rows are cut or filled to the width of the first. It scrolls by itself where it is too wide. */
export function table([names, marks, ...rest]) {
  const sides = cells(marks).map(side);
  const head = row("th", cells(names), sides);
  const rows = rest.map((line) => row("td", cells(line), sides));
  const whole = h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows));
  return h("div", { class: "table", tabindex: "0" }, whole);
}

function row(tag, texts, sides) {
  return h("tr", {}, ...sides.map((side, at) => h(tag, { class: side }, ...inline(texts[at] ?? ""))));
}

function cells(line) {
  const parts = line.trim().split(BAR).map((part) => part.trim().replaceAll("\\|", "|"));
  if (parts[0] === "") parts.shift();
  if (parts.at(-1) === "") parts.pop();
  return parts;
}

function side(mark) {
  const [, left, right] = DELIMITER.exec(mark);
  return right ? (left ? "center" : "right") : undefined;
}
