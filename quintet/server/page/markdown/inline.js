/** Renders what stands within a line of Markdown: code, bold, italics, links. No address is loaded, images neither. */

import { h } from "../dom.js";

const SAFE = /^(?:https?:\/\/|mailto:)[^\s<>]+$/i;
const POINTED = /<((?:https?:\/\/|mailto:)[^\s<>]+)>|<br\s?\/?>/iy;
const BARE = /https?:\/\/[^\s<>"`]{1,2000}/y;
const ESCAPED = /[\\`*_~#|<>+.!-]/;
const LETTER = /[\p{L}\p{N}_]/u;
const ASCII = /[0-9A-Za-z]/; // 2*3*4 is a product; between letters of other scripts a star may well be a mark
const NAMES = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };
const DEEPEST = 8; // marks within marks
const FARTHEST = 2000; // characters from the beginning of a link to its end

/** What may begin with a sign: a reader of [node, where it ends], or null where the sign stands for itself. */
const READERS = {
  "\\": escape, "`": code, "*": emphasis, _: emphasis, "~": emphasis, "[": link, "!": image, "<": pointed, h: bare,
};

/** The nodes and texts of a stretch of text. */
export function inline(text, depth = 0) {
  const found = [];
  const lost = new Set(); // marks whose end was looked for and is not there: they are not looked for again
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const read = depth < DEEPEST && READERS[text[at]]?.(text, at, depth, lost);
    if (read && typeof read[0] !== "string") found.push(plain, read[0]);
    plain = read ? (typeof read[0] === "string" ? plain + read[0] : "") : plain + text[at];
    at = read ? read[1] : at + 1;
  }
  return [...found, plain].filter((each) => each !== "");
}

function escape(text, at) {
  return ESCAPED.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : null;
}

/** How often the sign at a place stands there in a row. */
function run(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end++;
  return end - at;
}

/** Where code that begins at a place ends, or -1; its mark may be any number of backticks. */
function codeEnd(text, at, size) {
  for (let end = text.indexOf("`", at + size); end >= 0; end = text.indexOf("`", end)) {
    const found = run(text, end);
    if (found === size) return end;
    end += found;
  }
  return -1;
}

function code(text, at, _, lost) {
  const size = run(text, at);
  const mark = text.slice(at, at + size);
  const end = lost.has(mark) ? -1 : codeEnd(text, at, size);
  if (end < 0) {
    lost.add(mark);
    return [mark, at + size];
  }
  const inner = text.slice(at + size, end).replaceAll("\n", " ");
  const padded = /^ .*\S.* $/.test(inner);
  return [h("code", {}, padded ? inner.slice(1, -1) : inner), end + size];
}

function emphasis(text, at, depth, lost) {
  const size = run(text, at);
  const mark = text.slice(at, at + size);
  const name = size <= (text[at] === "~" ? 2 : 3) && NAMES[text[at]][Math.min(size, 2) - 1];
  const end = name && !lost.has(mark) && opens(text, at, size) ? emphasisEnd(text, at, size, lost, mark) : -1;
  if (end < 0) return [mark, at + size];
  const inner = inline(text.slice(at + size, end), depth + 1);
  return [size === 3 ? h("strong", {}, h("em", {}, ...inner)) : h(name, {}, ...inner), end + size];
}

function opens(text, at, size) {
  return /\S/.test(text[at + size] ?? "") && !joins(text[at], size, text[at - 1]);
}

/** Whether a mark stands against a letter that it would cut off from its word. */
function joins(sign, size, neighbour = "") {
  return sign === "_" ? LETTER.test(neighbour) : sign === "*" && size === 1 && ASCII.test(neighbour);
}

/** Where the mark stands that ends what one begins; a run of three may end what is within, too. */
function emphasisEnd(text, at, size, lost, mark) {
  for (let next = at + size; next < text.length; ) {
    if (text[next] === "\\") next += 2;
    else if (text[next] === "`") {
      const length = run(text, next);
      const end = codeEnd(text, next, length);
      next = (end < 0 ? next : end) + length;
    } else if (text[next] === text[at]) {
      const length = run(text, next);
      const fits = (length === size || length === 3) && /\S/.test(text[next - 1]);
      if (fits && !joins(text[at], size, text[next + length])) return next + length - size;
      next += length;
    } else next++;
  }
  lost.add(mark);
  return -1;
}

function link(text, at, depth, lost) {
  if (!lost.has("](") && text.indexOf("](", at) < 0) lost.add("](");
  const read = lost.has("](") ? null : target(text, at);
  return read && [anchor(read.address, inline(read.label, depth + 1)), read.end];
}

/** An image is a link to it: the reader decides whether its server hears of him. */
function image(text, at) {
  const read = text[at + 1] === "[" ? target(text, at + 1) : null;
  return read && [anchor(read.address, [read.label || read.address]), read.end];
}

/** The label and the address of a link that begins at a bracket, or null. */
function target(text, at) {
  const close = matching(text, at, "[", "]");
  if (close < 0 || text[close + 1] !== "(") return null;
  const end = matching(text, close + 1, "(", ")");
  const [address, ...title] = text.slice(close + 2, Math.max(end, 0)).trim().split(/\s+(?=["'(])/);
  const bare = address.replace(/^<(.*)>$/, "$1");
  if (end < 0 || title.length > 1 || !isSafe(bare)) return null;
  return { label: text.slice(at + 1, close), address: bare, end: end + 1 };
}

function matching(text, at, open, close) {
  const last = Math.min(text.length, at + FARTHEST);
  for (let next = at, depth = 0; next < last; next++) {
    if (text[next] === "\\") next++;
    else if (text[next] === open) depth++;
    else if (text[next] === close && --depth === 0) return next;
  }
  return -1;
}

function pointed(text, at) {
  POINTED.lastIndex = at;
  const match = POINTED.exec(text);
  if (!match) return null;
  if (!match[1]) return [h("br"), POINTED.lastIndex];
  return isSafe(match[1]) ? [anchor(match[1], [match[1]]), POINTED.lastIndex] : null;
}

function bare(text, at) {
  BARE.lastIndex = at;
  const match = LETTER.test(text[at - 1] ?? "") ? null : BARE.exec(text);
  if (!match) return null;
  const address = withoutStop(match[0]);
  return isSafe(address) ? [anchor(address, [address]), at + address.length] : null;
}

/** Signs that end a sentence are none of an address; nor is a bracket that opens before it. */
function withoutStop(address) {
  const shorter = address.replace(/[.,;:!?'*_~\]}]+$/, "");
  const unmatched = shorter.endsWith(")") && shorter.split("(").length < shorter.split(")").length;
  return unmatched ? withoutStop(shorter.slice(0, -1)) : shorter;
}

function isSafe(address) {
  return SAFE.test(address) && URL.canParse(address);
}

function anchor(address, label) {
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...label);
}
