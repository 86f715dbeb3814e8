/** The conversation that is shown: sends it, streams the answer into it, changes its end, and keeps it. */

import { complete } from "./api.js";
import { contentOf } from "./composer/pictures.js";
import { fitting } from "./composer/text_files.js";
import { Current } from "./conversations/current.js";
import { byId, swap } from "./dom.js";
import { Facts } from "./messages/facts.js";
import { Message } from "./messages/message.js";
import { shortName } from "./model_picker.js";
import { Popup } from "./messages/tokens.js";

const NEAR = 80; // px from the end: nearer than this, the view follows the answer

export class Chat {
  #messages = [];
  #list = byId("messages");
  #empty = byId("empty");
  #current;
  #popup = new Popup();
  #abort = null;
  #turn = null; // the one that is answered: the messages `before` it, and the `text` and `files` that ask

  /**
   * `picker` has the model; `store` has the conversations. `on.busy(flag)`: an answer starts or ends.
   * `on.refused(error)`: one failed. `on.back(text, files)` takes a question without an answer, and `on.failed(reason)`
   * the reason. `on.draft()` is the text and the files that are being written. `on.unkept(reason)`: the browser did not
   * keep the conversation, or, with an empty reason, did. `on.shown()`: other messages are shown.
   */
  constructor(settings, picker, store, on) {
    this.settings = settings;
    this.picker = picker;
    this.on = on;
    this.#current = new Current(store);
  }

  /** Id of the conversation in the store; null until it is kept. */
  get id() {
    return this.#current.id;
  }

  get busy() {
    return this.#abort !== null;
  }

  /** False where the parameters cannot be sent; the text then stays with the reader. */
  send(text, files = []) {
    if (this.busy || !this.settings.check()) return false;
    const before = [...this.#messages];
    this.#question(text, files);
    this.#answer({ before, text, files });
    return true;
  }

  /** Shows the conversation of before a reload, and returns its record: draft and files were not sent. */
  restore() {
    return this.#load(this.#current.restore());
  }

  /** Shows the conversation with this id, or a new one for null; returns its record. Keep the shown one before. */
  open(id) {
    this.#turn = null; // an answer that ends now belongs to no conversation
    this.stop();
    return this.#load(this.#current.open(id));
  }

  /** Takes in changes of another tab; true where the conversation was deleted there. */
  sync() {
    if (this.#list.querySelector(".edit")) return false;
    const record = this.#current.changed(this.busy);
    if (record) this.#load(record);
    return record === null;
  }

  /** Keeps the conversation, and what was not sent: the draft, its files, and a turn that has no answer yet. */
  keep() {
    const { text: draft, files } = this.on.draft();
    const unanswered = this.#turn && this.busy && this.#messages.at(-1)?.isEmpty;
    const messages = unanswered ? this.#turn.before : this.#messages;
    const text = unanswered ? [this.#turn.text, draft].filter(Boolean).join("\n\n") : draft;
    const unsent = unanswered ? fitting([...(this.#turn.files ?? []), ...files]) : files;
    this.on.unkept(this.#current.save(messages.map((message) => message.kept), text, unsent));
  }

  stop() {
    this.#abort?.abort();
  }

  /** Turns the last question into a field; false where there is none or an answer streams. */
  editLast() {
    const at = this.#messages.findLastIndex(({ role }) => role === "user");
    if (this.busy || at < this.#messages.length - 2 || at < 0) return false;
    this.#edit(at);
    return true;
  }

  /** Messages as the API takes them, with a question that is not sent yet. */
  turns(text = "", files = []) {
    const next = text.trim() || files.length ? [{ role: "user", content: contentOf(text, files) }] : [];
    return [...this.settings.system, ...this.#messages.flatMap((message) => message.turns), ...next];
  }

  /** Tokens of the conversation as the server counted them for the last answer; null where it did not. */
  get context() {
    return this.#messages.at(-1)?.context ?? null;
  }

  /** Draws everything again, for tokens or for text. */
  redraw() {
    for (const message of this.#messages) message.draw();
  }

  #load(record) {
    const messages = record.messages.map((kept) => {
      const message = this.#message(kept.role, kept.name ?? kept.role);
      message.restore(kept);
      return message;
    });
    this.#draw(messages);
    this.#list.scrollTop = this.#list.scrollHeight;
    return record;
  }

  #question(text, files) {
    const message = this.#add("user", "You");
    message.files = files;
    message.text = text;
  }

  #message(role, name) {
    return new Message(role, name, this.#popup, () => this.settings.probabilities);
  }

  #add(role, name) {
    const message = this.#message(role, name);
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
    this.#draw(messages);
    if (!this.busy) this.keep();
  }

  #draw(messages) {
    this.#messages = messages;
    swap(this.#list, [this.#empty, ...messages.map(({ element }) => element)]);
    this.#empty.hidden = messages.length > 0;
    this.#offer();
    this.on.shown();
  }

  #request() {
    return {
      model: this.picker.model || undefined,
      messages: this.turns(),
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
    const answer = this.#add("assistant", shortName(this.picker.model) || "Assistant");
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
    answer.context = facts.context;
    answer.summarize(facts.words(), facts.finish);
  }

  /** A turn without a word of answer is none: what stood before it stands again, and its text goes back. */
  #takeBack(turn, answer, failure) {
    answer.state = failure ? "failed" : "stopped";
    if (turn !== this.#turn) return; // cleared meanwhile
    this.#show(turn.before);
    if (turn.text || turn.files?.length) this.on.back(turn.text, turn.files);
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
    const { files } = before[at];
    this.#cut(at);
    this.#question(text, files);
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
