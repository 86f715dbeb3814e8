/** The conversation: sends it, streams the answer into it, and changes its end. */

import { complete } from "./api.js";
import { byId } from "./dom.js";
import { Message } from "./message.js";
import { Popup } from "./tokens.js";

const NEAR = 80; // px from the end: nearer than this, the view follows the answer

export class Chat {
  #messages = [];
  #list = byId("messages");
  #popup = new Popup();
  #abort = null;

  /** `on.busy(flag)` tells that an answer starts or ends, `on.refused(error)` that one failed. */
  constructor(settings, model, on) {
    this.settings = settings;
    this.model = model;
    this.on = on;
  }

  get busy() {
    return this.#abort !== null;
  }

  /** False where the parameters cannot be sent; the text then stays with the reader. */
  send(text) {
    if (this.busy || !this.settings.check()) return false;
    this.#add("user", "You").text = text;
    this.#answer();
    return true;
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.#cut(0);
  }

  /** Draws everything again, for tokens or for text. */
  redraw() {
    for (const message of this.#messages) message.draw();
  }

  #add(role, name) {
    const message = new Message(role, name, this.#popup, () => this.settings.probabilities);
    this.#messages.push(message);
    this.#list.append(message.element);
    this.#list.scrollTop = this.#list.scrollHeight;
    byId("empty").hidden = true;
    return message;
  }

  #cut(length) {
    for (const message of this.#messages.splice(length)) message.element.remove();
    byId("empty").hidden = length > 0;
    this.#offer();
  }

  #request() {
    const said = this.#messages.filter((message) => message.role === "user" || message.content);
    return {
      model: this.model() || undefined,
      messages: [...this.settings.system, ...said.map(({ role, content }) => ({ role, content }))],
      stream: true,
      stream_options: { include_usage: true },
      ...this.settings.fields(),
    };
  }

  async #answer() {
    const body = this.#request();
    const abort = new AbortController();
    this.#abort = abort;
    const answer = this.#add("assistant", this.model() || "Assistant");
    answer.state = "streaming";
    this.#offer();
    this.on.busy(true);
    const facts = new Facts();
    let follows = true; // as the reader was at the end before the last piece came
    try {
      for await (const chunk of complete(body, abort.signal)) {
        follows = this.#near();
        facts.note(chunk);
        answer.take(chunk.choices?.[0] ?? {});
        if (follows) this.#follow();
      }
      answer.state = "done";
    } catch (error) {
      follows = this.#near();
      if (abort.signal.aborted) answer.state = "stopped";
      else {
        answer.fail(error.message);
        this.on.refused(error);
      }
    }
    this.#abort = null;
    answer.summarize(facts.words(), facts.finish);
    this.#offer();
    if (follows) this.#follow();
    this.on.busy(false, answer);
  }

  #near() {
    return this.#list.scrollHeight - this.#list.scrollTop - this.#list.clientHeight < NEAR;
  }

  #follow() {
    requestAnimationFrame(() => (this.#list.scrollTop = this.#list.scrollHeight));
  }

  /** Puts the buttons below the last question and the last answer. */
  #offer() {
    for (const message of this.#messages) message.offer([]);
    if (this.busy) return;
    const end = this.#messages.length - 1;
    const last = this.#messages[end];
    if (last) last.offer([["Regenerate", () => this.#again()], ["Edit", () => this.#edit(end)], this.#deletion(end)]);
    const before = this.#messages[end - 1];
    if (last?.role === "assistant" && before?.role === "user") before.offer([["Edit", () => this.#edit(end - 1)]]);
  }

  #deletion(at) {
    const remove = () => {
      this.#cut(at);
      byId("text").focus(); // the button that had it is gone
    };
    return ["Delete", remove];
  }

  #again() {
    if (this.busy || !this.settings.check()) return;
    const end = this.#messages.length - 1;
    if (this.#messages[end].role === "assistant") this.#cut(end);
    this.#answer();
  }

  /** A question that was edited is asked again; an answer that was edited stays as it is. */
  #edit(at) {
    const message = this.#messages[at];
    const asks = message.role === "user";
    message.edit((text) => {
      if (this.busy || (asks && !this.settings.check())) return;
      message.text = text;
      if (!asks) return;
      this.#cut(at + 1);
      this.#again();
    });
  }
}

/** What is known of one answer: its tokens and its pace. */
class Facts {
  #start = performance.now();
  #first = null;
  #last = null;
  #chunks = 0;
  #usage = null;
  finish = null;

  note(chunk) {
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) {
      this.#first ??= performance.now();
      this.#chunks++;
    }
    this.finish = choice?.finish_reason ?? this.finish;
    this.#usage = chunk.usage ?? this.#usage;
    this.#last = performance.now();
  }

  words() {
    if (this.#first === null) return [];
    const tokens = this.#usage?.completion_tokens ?? this.#chunks;
    const seconds = (this.#last - this.#first) / 1000;
    // An answer that came at once says nothing of the pace.
    const pace = tokens > 1 && seconds > 0.05 ? [`${((tokens - 1) / seconds).toFixed(1)} tokens/s`] : [];
    const wait = `first after ${Math.round(this.#first - this.#start)} ms`;
    return [`${tokens} ${tokens === 1 ? "token" : "tokens"}`, ...pace, wait];
  }
}
