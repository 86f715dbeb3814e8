/** One message of the conversation, and how it looks: text, or tokens where their probabilities came with it. */

import { Calls } from "./calls.js";
import { copyButton } from "../clipboard.js";
import { fileChip } from "../composer/attachments.js";
import { contentOf } from "../composer/pictures.js";
import { h, swap } from "../dom.js";
import { Growing } from "../markdown/markdown.js";
import { Stopwatch, Thinking, split } from "./thinking.js";
import { TokenRow } from "./tokens.js";

const STATES = { stopped: "stopped", failed: "failed" };
const FINISHES = { length: "max tokens reached", content_filter: "filtered" };

export class Message {
  content = ""; // as it came: thoughts may stand in it, between tags
  reasoning = ""; // thoughts that came beside it
  files = []; // files that the user attached: names, with texts or with pictures
  context = null; // tokens of the conversation up to here, as the server counted them
  calls = new Calls();
  tokens = null; // a TokenRow, once the first probability comes
  #popup;
  #drawing = false;
  #thoughtFor = new Stopwatch();
  #words = []; // of the summary
  #body = h("div", { class: "body" });
  #growing = new Growing(this.#body);
  #thinking = new Thinking();
  #error = h("p", { class: "error", role: "alert", hidden: true });
  #stats = h("span", { class: "stats" });
  #actions = h("span");
  #copy = copyButton("answer", () => this.text);

  /** `byToken` is asked at each drawing whether tokens are wanted. */
  constructor(role, name, popup, byToken) {
    this.role = role;
    this.name = name;
    this.byToken = byToken;
    this.#popup = popup;
    const buttons = h("span", { class: "actions" }, ...(role === "assistant" ? [this.#copy] : []), this.#actions);
    const footer = h("footer", {}, this.#stats, buttons);
    const parts = [h("h3", {}, name), this.#thinking.element, this.#body, this.calls.element, this.#error, footer];
    this.element = h("article", { class: `message ${role}` }, ...parts);
  }

  /** Streaming, done, stopped or failed. Screen readers wait while an answer is busy and read it whole. */
  set state(state) {
    this.element.dataset.state = state;
    this.element.setAttribute("aria-busy", String(state === "streaming"));
    this.draw();
  }

  get state() {
    return this.element.dataset.state;
  }

  /** The text of the message without its reasoning. */
  get text() {
    return this.role === "user" ? this.content : this.#split().answer;
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.list.length;
  }

  /** The message as the API takes it, with the results of its calls. Calls without a result are left out. */
  get turns() {
    const calls = this.calls.answered;
    if (!calls.length) return [{ role: this.role, content: contentOf(this.text, this.files) }];
    const tool_calls = calls.map(({ id, name, arguments: text }) =>
      ({ id, type: "function", function: { name, arguments: text || "{}" } }));
    const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
    const thought = this.reasoning ? { reasoning: this.reasoning } : {};
    return [{ role: this.role, content: this.text || null, ...thought, tool_calls }, ...results];
  }

  /** What is kept of the message over a reload, and what `restore` takes. */
  get kept() {
    // A reload ends an answer that streams, and may do so before this is asked.
    const state = this.state === "done" ? "done" : "stopped";
    const { role, name, content, reasoning } = this;
    const kept = { role, name, content, reasoning, state, stats: this.#words.join(" · "), took: this.#thoughtFor.words };
    if (this.calls.list.length) kept.calls = this.calls.list;
    if (this.files.length) kept.files = this.files;
    if (this.context !== null) kept.context = this.context;
    return kept;
  }

  restore({ content, reasoning = "", state = "done", stats = "", took = "", calls = [], files = [], context = null }) {
    this.content = content;
    this.files = files;
    this.context = context;
    this.reasoning = reasoning;
    this.#thoughtFor.words = took;
    this.calls.restore(calls);
    if (this.role === "user") return this.draw();
    this.state = state in STATES ? state : "done";
    this.summarize([stats]);
  }

  /** Takes in one chunk of a streamed answer. */
  take({ delta, logprobs }) {
    this.content += delta?.content ?? "";
    this.reasoning += delta?.reasoning ?? delta?.reasoning_content ?? "";
    this.calls.take(delta?.tool_calls);
    this.#thoughtFor.note(this.isThinking, this.reasoning !== "" || this.content !== "");
    if (logprobs?.content?.length) {
      this.tokens ??= new TokenRow(this.#popup);
      this.tokens.append(logprobs.content, this.#popup);
    }
    this.#drawSoon();
  }

  set text(text) {
    this.content = text;
    this.context = null;
    this.tokens = null; // probabilities belong to what the model wrote
    this.draw();
  }

  /** Whether what came so far ends in a thought. */
  get isThinking() {
    if (this.calls.list.length) return false;
    if (this.reasoning) return !this.content.trim();
    return this.content.trimStart().startsWith("<think>") && !this.content.includes("</think>");
  }

  /** Has the reader answer the calls, and `send` called then; null: he no longer can. */
  ask(send) {
    this.calls.draw(send);
  }

  fail(reason) {
    this.#error.textContent = reason;
    this.#error.hidden = false;
    this.state = "failed";
  }

  /** Sets the line below an answer; `finish` is the server's finish_reason. */
  summarize(words, finish) {
    this.#words = [...words, FINISHES[finish]].filter(Boolean);
    this.#stats.textContent = [...this.#words, STATES[this.state]].filter(Boolean).join(" · ");
  }

  /** The buttons below the message: pairs of a name and what it does. */
  offer(actions) {
    this.#actions.replaceChildren(
      ...actions.map(([name, act]) => h("button", { type: "button", on: { click: act } }, name)),
    );
  }

  /** Turns the message into a field, and back when it is saved or left. */
  edit(save) {
    const field = h("textarea", { rows: Math.min(12, this.content.split("\n").length + 1), "aria-label": "Edit" });
    field.value = this.content;
    const close = () => this.draw();
    const form = h("form", { class: "edit" }, field, h("button", { type: "submit", class: "first" }, "Save"));
    form.append(h("button", { type: "button", on: { click: close } }, "Cancel"));
    form.addEventListener("keydown", (event) => event.key === "Escape" && close());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      save(field.value);
    });
    this.#body.replaceChildren(form);
    field.focus();
  }

  draw() {
    const byToken = this.tokens !== null && this.byToken();
    if (this.role === "assistant") this.#drawThoughts(byToken);
    if (byToken) swap(this.#body, [this.tokens.element]);
    else if (this.role === "user") this.#body.replaceChildren(...this.files.map(fileChip), ...this.#paragraph());
    else this.#growing.draw(this.text);
    if (this.state === "streaming") this.calls.draw();
  }

  #paragraph() {
    return this.content || !this.files.length ? [h("p", {}, this.content)] : [];
  }

  /** Where all tokens are shown, those of thoughts are among them. */
  #drawThoughts(byToken) {
    const { thought, answer } = this.#split();
    const whole = [this.reasoning.trim(), byToken ? "" : thought].filter(Boolean).join("\n\n");
    const answered = answer !== "" || this.calls.list.length > 0;
    const going = this.state === "streaming" && whole !== "" && !answered;
    this.#thinking.draw(whole, { going, answered, took: this.#thoughtFor.words });
    this.#copy.hidden = !answer || this.state === "streaming";
  }

  #split() {
    return split(this.content, this.state === "streaming");
  }

  #drawSoon() {
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      if (this.state === "streaming") this.draw(); // afterwards it may be a field
    });
  }
}
