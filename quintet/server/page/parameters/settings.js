/** The form of parameters: what is left empty is not sent, so that the server's default holds. */

import { byId } from "../dom.js";
import { servedTools } from "./served.js";
import { parseTools, wrongTools } from "./tools.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];
export const FIELDS = [...NUMBERS, "system", "stop", "tools"];
const ESCAPES = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
const ALTERNATIVES = 5; // shown for each token

export class Settings {
  #form = byId("parameters");

  /** `onToggle` is called when token probabilities are asked for, or no more. */
  constructor(onToggle) {
    this.#form.addEventListener("input", () => this.#show());
    this.#form.elements.probabilities.addEventListener("change", onToggle);
    this.#form.addEventListener("reset", () => setTimeout(() => (this.#show(), onToggle()))); // the fields empty first
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#show();
  }

  get probabilities() {
    return this.#form.elements.probabilities.checked;
  }

  /** The system prompt as a list of no or one message. */
  get system() {
    const text = this.#form.elements.system.value;
    return text.trim() ? [{ role: "system", content: text }] : [];
  }

  /** Opens the form at the first field that cannot be sent; true where there is none. */
  check() {
    const { tools } = this.#form.elements;
    tools.setCustomValidity(wrongTools(tools.value));
    if (this.#form.checkValidity()) return true;
    this.#form.closest("details").open = true;
    return this.#form.reportValidity();
  }

  /** The fields of the request that the reader has set. */
  fields() {
    const fields = {};
    for (const name of NUMBERS) {
      const { value } = this.#form.elements[name];
      if (value !== "") fields[name] = Number(value);
    }
    const stop = this.#form.elements.stop.value.split("\n").filter((line) => line !== "").map(unescape);
    if (stop.length) fields.stop = stop;
    const tools = wrongTools(this.#form.elements.tools.value) ? [] : parseTools(this.#form.elements.tools.value);
    const all = [...tools, ...servedTools()];
    if (all.length) fields.tools = all;
    if (this.probabilities) Object.assign(fields, { logprobs: true, top_logprobs: ALTERNATIVES });
    return fields;
  }

  /** Every field as text, for a preset. Tool servers are chosen each time. */
  get values() {
    return Object.fromEntries(FIELDS.map((name) => [name, this.#form.elements[name].value]));
  }

  /** Sets every field; one that is missing is emptied. */
  set values(values) {
    for (const name of FIELDS) this.#form.elements[name].value = values[name] ?? "";
    this.#show();
  }

  #show() {
    const set = Object.keys(this.fields()).filter((name) => name !== "top_logprobs").length + this.system.length;
    byId("changed").textContent = set ? `${set} set` : "";
    byId("legend").hidden = !this.probabilities;
  }
}

function unescape(text) {
  return text.replace(/\\([ntr\\])/g, (_, letter) => ESCAPES[letter]);
}
