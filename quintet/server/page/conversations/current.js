/** The conversation that this tab shows: its record, and changes of the record by another tab. */

import { bounded, readRecord } from "./record.js";
import { newId } from "./store.js";

const OPEN = `quintet.open:${location.pathname}`; // in sessionStorage: a reload shows the same conversation
const MAX_LENGTH = 1_000_000; // characters of one conversation; the oldest turns go first
const NEW = { title: "", messages: [], draft: "", files: [] };

export class Current {
  id = null; // of a new conversation until it is kept
  #text = null; // the record as this tab last read or wrote it
  #known = withoutTime(NEW); // the same without its time
  #title = "";
  #reason = ""; // why the last text was not kept

  constructor(store) {
    this.store = store;
  }

  /** The record that was open before a reload, or an empty one. */
  restore() {
    return this.open(sessionValue());
  }

  /** The record with this id, or an empty one. */
  open(id) {
    const record = id === null ? null : this.store.get(id);
    this.id = record ? id : null;
    this.#take(record);
    return record ?? NEW;
  }

  /** Keeps the conversation; returns why it could not, or an empty text. */
  save(messages, draft, files) {
    const rest = 2 * draft.length + files.reduce((sum, { text }) => sum + 2 * text.length, 0) + 1000;
    const record = readRecord({ title: this.#title, messages: bounded(messages, MAX_LENGTH - rest), draft, files });
    const known = withoutTime(record);
    if (known === this.#known) return this.#reason;
    if (!messages.length && !draft && !files.length) {
      const { id } = this;
      this.open(null);
      if (id !== null) this.store.remove(id);
      return "";
    }
    // Another tab has changed or deleted the record meanwhile: this tab's becomes a second conversation.
    if (this.id === null || this.store.text(this.id) !== this.#text) this.id = newId();
    this.#known = known;
    this.#text = JSON.stringify({ ...record, updated: Date.now() });
    remember(this.id);
    return (this.#reason = this.store.put(this.id, this.#text));
  }

  /**
   * The record if its messages changed outside this tab, null if it was deleted, undefined if neither. A tab that is
   * `busy` with an answer takes in a new title alone.
   */
  changed(busy) {
    if (this.id === null || this.store.text(this.id) === this.#text) return undefined;
    const record = this.store.get(this.id);
    const same = record && JSON.stringify(record.messages) === JSON.stringify(JSON.parse(this.#known).messages);
    if (busy && !same) return undefined;
    if (record) this.#take(record);
    return same ? undefined : record;
  }

  #take(record) {
    this.#title = record?.title ?? "";
    this.#reason = "";
    this.#text = this.id === null ? null : this.store.text(this.id);
    this.#known = withoutTime(record ?? NEW);
    remember(this.id);
  }
}

function withoutTime({ title, messages, draft, files }) {
  return JSON.stringify({ title, messages, draft, files });
}

function sessionValue() {
  try {
    return sessionStorage.getItem(OPEN);
  } catch {
    return null;
  }
}

function remember(id) {
  try {
    if (id === null) sessionStorage.removeItem(OPEN);
    else sessionStorage.setItem(OPEN, id);
  } catch {
    // A browser that keeps nothing: a reload begins a new conversation.
  }
}
