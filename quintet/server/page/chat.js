/** The conversation: sends it, streams the answer into it, changes its end, and keeps it over a reload. */

import { complete } from "./api.js";
import { byId, swap } from "./dom.js";
import { Facts } from "./facts.js";
import { Kept } from "./kept.js";
import { Message } from "./message.js";
import { Popup } from "./tokens.js";

const NEAR = 80; // px from the end: nearer than this, the view follows the answer

export class Chat {
  #messages = [];
  #list = byId("messages");
  #empty = byId("empty");
  #kept = new Kept();
  #popup = new Popup();
  #abort = null;
  #turn = null; // the one that is answered: what stood `before` it, and the `text` that asks

  /**
   * `on.busy(flag)` tells that an answer starts or ends, `on.refused(error)` that one failed; `on.back(text)` gives back
   * what got no answer, and `on.failed(reason)` says why.
   */
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
    const before = [...this.#messages];
    this.#add("user", "You").text = text;
    this.#answer({ before, text });
    return true;
  }

  /** Shows what was kept; the text that was not sent. */
  restore() {
    const { messages, draft } = this.#kept.load();
    for (const kept of messages) this.#add(kept.role, kept.name ?? kept.role).restore(kept);
    this.#offer();
    return draft;
  }

  /** Keeps the conversation, and a text that was not sent. An answer without a word is as if it had not been asked for. */
  keep(draft = "") {
    const unanswered = this.busy && this.#messages.at(-1)?.isEmpty; // none is left where it was cleared
    const messages = unanswered ? this.#turn.before : this.#messages;
    const text = unanswered ? [this.#turn.text, draft].filter(Boolean).join("\n\n") : draft;
    this.#kept.save(messages.map((message) => message.kept), text);
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.#turn = null; // an answer that ends now is nobody's
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
    this.#empty.hidden = true;
    return message;
  }

  #cut(length) {
    this.#show(this.#messages.slice(0, length));
  }

  #show(messages) {
    this.#messages = messages;
    swap(this.#list, [this.#empty, ...messages.map(({ element }) => element)]);
    this.#empty.hidden = messages.length > 0;
    this.#offer();
    if (!this.busy) this.keep();
  }

  #request() {
    return {
      model: this.model() || undefined,
      messages: [...this.settings.system, ...this.#messages.flatMap((message) => message.turns)],
      stream: true,
      stream_options: { include_usage: true },
      ...this.settings.fields(),
    };
  }

  async #answer(turn) {
    const body = this.#request();
    const abort = new AbortController();
    this.#abort = abort;
    this.#turn = turn;
    const answer = this.#add("assistant", this.model() || "Assistant");
    answer.state = "streaming";
    this.#offer();
    this.on.busy(true);
    const facts = new Facts();
    const error = await this.#stream(body, abort.signal, answer, facts);
    const follows = this.#near();
    this.#abort = null;
    if (error && answer.isEmpty) this.#takeBack(turn, answer, abort.signal.aborted ? null : error.message);
    else this.#settle(answer, facts, error, abort.signal.aborted);
    this.#offer();
    this.keep();
    if (follows) this.#follow();
    this.on.busy(false, answer);
    if (error && !abort.signal.aborted) this.on.refused(error);
  }

  /** Takes in what comes; what went wrong, or null. */
  async #stream(body, signal, answer, facts) {
    try {
      for await (const chunk of complete(body, signal)) {
        const follows = this.#near(); // as the reader was at the end before this piece came
        facts.note(chunk);
        answer.take(chunk.choices?.[0] ?? {});
        if (follows) this.#follow();
      }
      return null;
    } catch (error) {
      return error;
    }
  }

  /** Of an answer with a word in it, what came stays. */
  #settle(answer, facts, error, stopped) {
    if (error && !stopped) answer.fail(error.message);
    else answer.state = stopped ? "stopped" : "done";
    answer.summarize(facts.words(), facts.finish);
  }

  /** A turn without a word of answer is none: what stood before it stands again, and its text goes back. */
  #takeBack(turn, answer, failure) {
    answer.state = failure ? "failed" : "stopped";
    if (turn !== this.#turn) return; // cleared meanwhile
    this.#show(turn.before);
    if (turn.text) this.on.back(turn.text);
    if (failure) this.on.failed(failure);
  }

  #near() {
    return this.#list.scrollHeight - this.#list.scrollTop - this.#list.clientHeight < NEAR;
  }

  #follow() {
    requestAnimationFrame(() => (this.#list.scrollTop = this.#list.scrollHeight));
  }

  /** Puts the buttons below the last question and the last answer. */
  #offer() {
    for (const message of this.#messages) {
      message.offer([]);
      message.ask(null);
    }
    if (this.busy) return;
    const end = this.#messages.length - 1;
    const last = this.#messages[end];
    if (last?.role === "assistant") last.ask(() => this.#tell());
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
    const before = [...this.#messages];
    if (before.at(-1).role === "assistant") this.#cut(before.length - 1);
    this.#answer({ before });
  }

  /** The reader has answered the calls of the last message: the model goes on. */
  #tell() {
    if (this.busy || !this.settings.check()) return;
    this.#answer({ before: [...this.#messages] });
  }

  /** The old question stays as it is, its field open, in case that the new one gets no answer. */
  #askInstead(at, text) {
    const before = [...this.#messages];
    this.#cut(at);
    this.#add("user", "You").text = text;
    this.#answer({ before });
  }

  /** A question that was edited is asked again; an answer that was edited stays as it is. */
  #edit(at) {
    const message = this.#messages[at];
    const asks = message.role === "user";
    message.edit((text) => {
      if (this.busy || (asks && !this.settings.check())) return;
      if (asks) return this.#askInstead(at, text);
      message.text = text;
      this.keep();
    });
  }
}
