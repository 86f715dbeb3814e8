/** Keeps the conversation in this browser, so that a reload does not lose it. */

import { areCalls } from "./calls.js";

const MOST = 1_000_000; // characters; browsers give an origin some five million
const TEXTS = ["content", "name", "reasoning", "stats", "state", "took"];

export class Kept {
  // Several servers may stand behind one origin.
  #name = `quintet.conversation:${location.pathname}`;

  /** The messages, and the text that was not sent; nothing of what is no conversation. */
  load() {
    try {
      const { messages = [], draft = "" } = JSON.parse(localStorage.getItem(this.#name) ?? "{}");
      if (typeof draft === "string" && messages.every(isMessage)) return { messages, draft };
    } catch {
      // no conversation of ours, or a browser that keeps nothing
    }
    return { messages: [], draft: "" };
  }

  /** Forgets the oldest turns where all of them are too long to keep. */
  save(messages, draft = "") {
    const newest = bounded(messages, MOST - 2 * draft.length - 1000);
    try {
      if (newest.length || draft) localStorage.setItem(this.#name, JSON.stringify({ messages: newest, draft }));
      else localStorage.removeItem(this.#name);
    } catch {
      // The browser has no room or keeps nothing: the conversation goes on, and ends with the tab.
    }
  }
}

/** The end of a conversation that has room for so many characters of JSON, from a question on. */
function bounded(messages, room) {
  let from = messages.length;
  while (from > 0 && (room -= JSON.stringify(messages[from - 1]).length + 1) >= 0) from--;
  while (from > 0 && from < messages.length && messages[from].role !== "user") from++;
  return messages.slice(from);
}

function isMessage(message) {
  const texts = TEXTS.every((name) => ["string", "undefined"].includes(typeof message[name]));
  return ["user", "assistant"].includes(message.role) && typeof message.content === "string" && texts
    && (message.calls === undefined || areCalls(message.calls));
}
