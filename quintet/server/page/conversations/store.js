/** Conversations in the browser's storage: a key of localStorage each, so that two tabs never write over a list. */

import { readRecord } from "./record.js";

const NAME = `quintet.conversation:${location.pathname}`; // several servers may stand behind one origin
const PREFIX = `${NAME}#`;
export const MAX_COUNT = 500;
export const MAX_TOTAL = 4_000_000; // characters; browsers give an origin some five million
const MAX_UNSAVED = 20; // conversations that are in this tab's memory alone
const FULL = `This conversation is not kept: the ${MAX_COUNT} conversations or ${MAX_TOTAL / 1e6} million characters `
  + "that this page may keep are used up. Delete some; export them first if you need them.";
const REFUSED = "This conversation is not kept: the browser has no room, or does not let this page keep anything. "
  + "Export the conversation before you close this tab.";

export class Store {
  #unsaved = new Map(); // id -> text of a record that the browser did not take
  #read = new Map(); // id -> [text, record], so that search does not parse all records again
  #onChange;

  /** `onChange` is called when a record has changed, here or in another tab. */
  constructor(onChange) {
    this.#onChange = onChange;
    addEventListener("storage", ({ key }) => (key === null || key.startsWith(PREFIX)) && onChange());
    this.#adopt();
  }

  /** Every conversation that can be read, the newest first, as records with an `id`. */
  all() {
    const ids = new Set([...keys().map((key) => key.slice(PREFIX.length)), ...this.#unsaved.keys()]);
    const records = [...ids].map((id) => this.get(id)).filter(Boolean);
    return records.sort((a, b) => b.updated - a.updated || (a.id < b.id ? -1 : 1));
  }

  /** The record, or null where there is none that can be read. */
  get(id) {
    const text = this.text(id);
    if (this.#read.get(id)?.[0] !== text) this.#read.set(id, [text, parsed(id, text)]);
    return this.#read.get(id)[1];
  }

  /** The record as it is stored, or null. */
  text(id) {
    return this.#unsaved.get(id) ?? stored(PREFIX + id);
  }

  /** Returns why the record was not kept, or an empty text. A record that is not kept stays in this tab's memory. */
  put(id, text) {
    const reason = this.#write(id, text);
    this.#unsaved.delete(id);
    if (reason) {
      this.#unsaved.set(id, text);
      if (this.#unsaved.size > MAX_UNSAVED) this.#unsaved.delete(this.#unsaved.keys().next().value);
    }
    this.#onChange();
    return reason;
  }

  /** Adds all of these records, or none of them; returns why not, or an empty text. */
  addAll(records) {
    const reason = this.#writeAll(records);
    if (!reason) this.#onChange();
    return reason;
  }

  #writeAll(records) {
    const ids = [];
    for (const record of records) {
      const id = newId();
      const reason = this.#write(id, JSON.stringify(record));
      if (reason) {
        for (const each of ids) localStorage.removeItem(PREFIX + each);
        return reason;
      }
      ids.push(id);
    }
    return "";
  }

  remove(id) {
    this.#unsaved.delete(id);
    this.#read.delete(id);
    try {
      localStorage.removeItem(PREFIX + id);
    } catch {
      // A browser that keeps nothing has nothing to remove.
    }
    for (const [other, text] of this.#unsaved) if (!this.#write(other, text)) this.#unsaved.delete(other);
    this.#onChange();
  }

  #write(id, text) {
    const others = keys().filter((key) => key !== PREFIX + id);
    const used = others.reduce((sum, key) => sum + (stored(key)?.length ?? 0), 0);
    if (others.length >= MAX_COUNT || used + text.length > MAX_TOTAL) return FULL;
    try {
      localStorage.setItem(PREFIX + id, text);
      return "";
    } catch {
      return REFUSED;
    }
  }

  /** Takes in the one conversation that earlier versions kept. */
  #adopt() {
    const text = stored(NAME);
    if (text === null) return;
    try {
      const record = readRecord({ updated: Date.now(), ...JSON.parse(text) });
      if (record.messages.length && this.#writeAll([record])) return; // no room: it stays where it is
    } catch {
      // no conversation of this page
    }
    localStorage.removeItem(NAME);
  }
}

/** Random, also over plain HTTP, where browsers have no crypto.randomUUID. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function keys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

function stored(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

function parsed(id, text) {
  try {
    return { ...readRecord(JSON.parse(text)), id };
  } catch {
    return null;
  }
}
