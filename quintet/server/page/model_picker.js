/** The choice of model: every model of /v1/models, and its state where the server tells it. */

import { models } from "./api.js";
import { byId, h } from "./dom.js";

const MODEL = `quintet.model:${location.pathname}`;
const STATES = { loaded: "loaded", unloaded: "not loaded" };
const MAX_STATE = 20; // characters

export class ModelPicker {
  #field = byId("model");
  #entries = new Map();

  /** `onChange` is called when another model is chosen. */
  constructor(onChange) {
    this.#field.addEventListener("change", () => {
      remember(this.model);
      onChange();
    });
  }

  get model() {
    return this.#field.value;
  }

  /** The chosen model's name without folders; "" while there is none. */
  get name() {
    return shortName(this.model);
  }

  get isEmpty() {
    return this.#entries.size === 0;
  }

  /** True where the server says which models are loaded. */
  get hasStates() {
    return [...this.#entries.values()].some((entry) => stateOf(entry) !== undefined);
  }

  /** Tokens that the model's context holds; null where the server does not tell. */
  get maxModelLen() {
    const length = this.#entries.get(this.model)?.max_model_len;
    return Number.isFinite(length) && length > 0 ? length : null;
  }

  /** True where the server says that the model takes pictures. */
  get sees() {
    return this.#entries.get(this.model)?.architecture?.input_modalities?.includes("image") === true;
  }

  /** False only where the server says that it would have to load the model first. */
  get isLoaded() {
    return ["loaded", undefined].includes(stateOf(this.#entries.get(this.model)));
  }

  async load() {
    const entries = await models();
    this.#entries = new Map(entries.map((entry) => [entry.id, entry]));
    const ids = [...this.#entries.keys()];
    const options = [...this.#field.options];
    const same = options.length === ids.length && options.every((option, at) => option.value === ids[at]);
    const chosen = this.model || remembered();
    if (!same) this.#field.replaceChildren(...ids.map((id) => h("option", { value: id, title: id })));
    for (const option of this.#field.options) option.textContent = label(this.#entries.get(option.value), ids);
    if (!same && this.#entries.has(chosen)) this.#field.value = chosen;
    this.#field.disabled = this.isEmpty;
  }
}

/** A model's name without the folders of a path; a name of the hub, as Qwen/Qwen3-8B, stays whole. */
export function shortName(id) {
  const path = /^(?:[/\\~.]|[a-z]:[/\\])/i.test(id) || /\.gguf$/i.test(id);
  return path ? id.split(/[/\\]/).filter(Boolean).at(-1) ?? id : id;
}

/** Names that would be the same without their path keep it. */
function label(entry, ids) {
  const short = shortName(entry.id);
  const name = ids.filter((id) => shortName(id) === short).length > 1 ? entry.id : short;
  const state = stateOf(entry);
  return state === undefined ? name : `${name} (${STATES[state] ?? state})`;
}

/** The status of a model: text, or an object with a `value`. */
function stateOf(entry) {
  const state = entry?.status?.value ?? entry?.status;
  return typeof state === "string" ? state.slice(0, MAX_STATE) : undefined;
}

function remembered() {
  try {
    return localStorage.getItem(MODEL);
  } catch {
    return null;
  }
}

function remember(id) {
  try {
    localStorage.setItem(MODEL, id);
  } catch {
    // A browser that keeps nothing: the next visit begins with the first model.
  }
}
