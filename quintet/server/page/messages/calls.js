/** What a model calls: a card for each call, with its name and arguments, and what the reader answers to it. */

import { h } from "../dom.js";
import { runner } from "../parameters/served.js";

const TEXTS = ["id", "name", "arguments"];

/** The calls of one message. Each is {id, name, arguments, result}: `result` is text, or null until the user gives one. */
export class Calls {
  list = [];
  #places = new Map(); // the server's numbers of calls
  #drawn = ""; // what the cards show
  #send = null; // takes the results, where the reader may give them
  #form = h("form", { class: "calls", hidden: true });
  element = this.#form;

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#gather();
      this.#send?.();
    });
  }

  /** Takes in what is new of calls in a chunk. */
  take(parts) {
    for (const { index, id, function: part = {} } of parts ?? []) {
      const number = index ?? (part.name ? this.list.length : this.list.length - 1); // some servers count none
      if (!this.#places.has(number)) {
        this.#places.set(number, this.list.length);
        this.list.push({ id: id ?? `call_${this.list.length}`, name: part.name ?? "", arguments: "", result: null });
      }
      this.list[this.#places.get(number)].arguments += part.arguments ?? "";
    }
  }

  restore(list) {
    this.list = list.map((call) => ({ ...call, result: call.result ?? null }));
  }

  /** What a conversation has of them: the calls that were answered, and the answers. */
  get answered() {
    return this.list.filter((call) => call.result !== null && readable(call));
  }

  /** `send`: what to do when the reader has given every result; null where he cannot. */
  draw(send = null) {
    this.#form.hidden = this.list.length === 0;
    this.#send = send;
    const asks = send !== null && this.list.some(readable);
    const shown = JSON.stringify([this.list, asks]);
    if (shown === this.#drawn) return;
    this.#drawn = shown;
    const cards = this.list.map((call, place) => card(call, place, asks));
    this.#form.replaceChildren(...cards, ...(asks ? [button()] : []));
  }

  #gather() {
    for (const [place, call] of this.list.entries()) {
      const field = this.#form.elements[`result-${place}`];
      if (field) call.result = field.value;
    }
  }
}

/** Whether these are calls that were kept. */
export function areCalls(list) {
  return Array.isArray(list) && list.every((call) =>
    call && TEXTS.every((name) => typeof call[name] === "string") && ["string", "object"].includes(typeof call.result));
}

/** Its arguments as an object; null where they are none, as of a call that was cut off. */
function readable(call) {
  try {
    const value = JSON.parse(call.arguments || "{}");
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

function card(call, place, asks) {
  const value = readable(call);
  const text = value ? JSON.stringify(value, null, 2) : call.arguments;
  const name = call.name || "a tool";
  const parts = [h("p", { class: "name" }, "Calls ", h("code", {}, name)), block(text, `Arguments of ${name}`)];
  if (asks && value) {
    const field = h("textarea", { name: `result-${place}`, rows: 2 });
    field.value = call.result ?? "";
    parts.push(h("label", {}, `Result of ${name}`, field));
    const run = runner(call.name);
    if (run) parts.push(allowing(name, async () => (field.value = await run(value))));
  } else if (call.result !== null) {
    parts.push(h("p", { class: "name" }, "Result"), block(call.result, `Result of ${name}`));
  }
  return h("div", { class: "call", role: "group", "aria-label": `Call of ${name}` }, ...parts);
}

/** A button that runs the call, which nothing else does. */
function allowing(name, run) {
  const made = h("button", { type: "button" }, `Run ${name}`);
  made.addEventListener("click", async () => {
    made.disabled = true;
    await run();
    made.disabled = false;
  });
  return made;
}

function block(text, label) {
  return h("pre", { tabindex: 0, role: "region", "aria-label": label }, h("code", {}, text));
}

function button() {
  return h("button", { type: "submit", class: "first" }, "Send results");
}
