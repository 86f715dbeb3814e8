/** One message of the conversation, and how it looks: text, or tokens where their probabilities came with it. */

import { h } from "./dom.js";
import { render } from "./markdown.js";
import { TokenRow } from "./tokens.js";

const STATES = { stopped: "stopped", failed: "failed" };
const FINISHES = { length: "max tokens reached", content_filter: "filtered" };

export class Message {
  content = "";
  tokens = null; // a TokenRow, once the first probability comes
  #popup;
  #drawing = false;
  #body = h("div", { class: "body" });
  #error = h("p", { class: "error", role: "alert", hidden: true });
  #stats = h("span", { class: "stats" });
  #actions = h("span", { class: "actions" });

  /** `byToken` is asked at each drawing whether tokens are wanted. */
  constructor(role, name, popup, byToken) {
    this.role = role;
    this.byToken = byToken;
    this.#popup = popup;
    const footer = h("footer", {}, this.#stats, this.#actions);
    const parts = [h("h3", {}, name), this.#body, this.#error, footer];
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

  /** Takes in one chunk of a streamed answer. */
  take({ delta, logprobs }) {
    this.content += delta?.content ?? "";
    if (logprobs?.content?.length) {
      this.tokens ??= new TokenRow(this.#popup);
      this.tokens.append(logprobs.content, this.#popup);
    }
    this.#drawSoon();
  }

  set text(text) {
    this.content = text;
    this.tokens = null; // probabilities belong to what the model wrote
    this.draw();
  }

  fail(reason) {
    this.#error.textContent = reason;
    this.#error.hidden = false;
    this.state = "failed";
  }

  /** What is said below an answer; `finish` is the server's finish_reason. */
  summarize(words, finish) {
    this.#stats.textContent = [...words, STATES[this.state] ?? FINISHES[finish]].filter(Boolean).join(" · ");
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
    if (this.tokens && this.byToken()) {
      if (this.#body.firstChild !== this.tokens.element) this.#body.replaceChildren(this.tokens.element);
    } else if (this.role === "user") this.#body.replaceChildren(h("p", {}, this.content));
    else this.#body.replaceChildren(...render(this.content));
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
