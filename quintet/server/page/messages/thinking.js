/** What a model thinks before it answers: found between its tags, and folded away. */

import { h } from "../dom.js";
import { Growing } from "../markdown/markdown.js";

const OPEN = "<think>";
const CLOSE = "</think>";
const ALONE = /(?<!`)<\/think>[^\S\n]*\n/; // the end of a thought whose beginning stood in the prompt

/** Splits a text into reasoning and answer; in one that grows, half a tag at its end is neither. */
export function split(text, growing = false) {
  const begun = text.trimStart();
  if (begun.startsWith(OPEN)) return opened(begun.slice(OPEN.length), growing);
  if (growing && begun && OPEN.startsWith(begun)) return { thought: "", answer: "" };
  const end = ALONE.exec(text);
  if (!end) return { thought: "", answer: text };
  return { thought: text.slice(0, end.index).trim(), answer: after(text, end.index) };
}

function opened(text, growing) {
  const end = text.indexOf(CLOSE);
  if (end >= 0) return { thought: text.slice(0, end).trim(), answer: after(text, end) };
  return { thought: (growing ? withoutHalf(text) : text).trim(), answer: "" };
}

function after(text, end) {
  return text.slice(end + CLOSE.length).trimStart();
}

function withoutHalf(text) {
  const at = text.lastIndexOf("<");
  return at >= 0 && CLOSE.startsWith(text.slice(at)) ? text.slice(0, at) : text;
}

/** The fold: open while there is no answer yet, then closed, unless the reader has turned it. */
export class Thinking {
  #summary = h("summary", {});
  #text = h("div", { class: "thought" });
  #growing = new Growing(this.#text);
  #turned = false;
  element = h("details", { class: "thinking", hidden: true }, this.#summary, this.#text);

  constructor() {
    this.#summary.addEventListener("click", () => (this.#turned = true));
  }

  /** `going`: more thoughts may come. `answered`: something stands below them. `took`: how long, in words. */
  draw(thought, { going, answered, took }) {
    this.element.hidden = !thought;
    this.#summary.textContent = going ? "Thinking …" : ["Thoughts", took].filter(Boolean).join(", ");
    if (!this.#turned) this.element.open = !answered;
    this.#growing.draw(thought);
  }
}

/** How long an answer was thought about. */
export class Stopwatch {
  #start = null;
  words = ""; // once it is known

  /** Tells it whether thoughts are coming, and whether any have come. */
  note(going, begun) {
    if (going) this.#start ??= performance.now();
    else if (begun && this.#start !== null && !this.words) this.words = inWords((performance.now() - this.#start) / 1000);
  }
}

function inWords(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
