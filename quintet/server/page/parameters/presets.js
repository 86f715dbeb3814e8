/** Presets: named sets of the parameters form, kept in this browser. */

import { byId, h } from "../dom.js";
import { FIELDS } from "./settings.js";
import { offerUndo } from "../toast.js";

const PRESETS = `quintet.presets:${location.pathname}`;
const MAX_COUNT = 50;
const MAX_NAME = 60;
const MAX_LENGTH = 400_000; // characters of all presets
const FULL = `There is no room for the preset: at most ${MAX_COUNT} presets and ${MAX_LENGTH / 1000} thousand `
  + "characters are kept. Delete one first.";
const REFUSED = "The preset is not kept: the browser has no room, or does not let this page keep anything.";

export class Presets {
  #choice = byId("preset");
  #form = byId("presets");
  #name = byId("preset-name");

  constructor(settings) {
    this.settings = settings;
    this.#choice.addEventListener("change", () => this.#choose());
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#save();
    });
    byId("preset-delete").addEventListener("click", () => this.#delete());
    addEventListener("storage", ({ key }) => (key === null || key === PRESETS) && this.#draw());
    this.#draw();
  }

  /** Fills the form; the empty choice changes nothing. */
  #choose() {
    const preset = load().get(this.#choice.value);
    if (preset) this.settings.values = preset;
    this.#draw(this.#choice.value);
    this.#name.value = this.#choice.value;
    this.#note("");
  }

  /** A preset of the same name is replaced. */
  #save() {
    const name = this.#name.value.replace(/[\s\p{Cc}\p{Cf}]+/gu, " ").trim().slice(0, MAX_NAME);
    if (!name) {
      this.#note("A preset needs a name.");
      return this.#name.focus();
    }
    const reason = store(load().set(name, this.settings.values)); // as another tab has left them
    this.#note(reason || `Saved “${name}”.`);
    if (!reason) this.#draw(name);
  }

  #delete() {
    const name = this.#choice.value;
    const presets = load();
    const preset = presets.get(name);
    if (!preset) return;
    presets.delete(name);
    this.#note(store(presets));
    this.#draw();
    offerUndo(`Deleted the preset “${name}”.`, () => {
      this.#note(store(load().set(name, preset)));
      this.#draw(name);
      this.#choice.focus();
    });
  }

  #draw(chosen = this.#choice.value) {
    const names = [...load().keys()].sort((a, b) => a.localeCompare(b));
    const first = h("option", { value: "" }, names.length ? "none" : "none saved");
    this.#choice.replaceChildren(first, ...names.map((name) => h("option", { value: name }, name)));
    this.#choice.value = names.includes(chosen) ? chosen : "";
    byId("preset-delete").disabled = !this.#choice.value;
  }

  #note(text) {
    byId("preset-note").textContent = text;
  }
}

/** Presets by name. Whatever else stands in the storage is left out. */
function load() {
  try {
    const list = JSON.parse(localStorage.getItem(PRESETS) ?? "[]");
    return new Map(list.slice(0, MAX_COUNT).filter(isPreset).map(({ name, values }) => [name, fields(values)]));
  } catch {
    return new Map();
  }
}

function store(presets) {
  const text = JSON.stringify([...presets].map(([name, values]) => ({ name, values })));
  if (presets.size > MAX_COUNT || text.length > MAX_LENGTH) return FULL;
  try {
    localStorage.setItem(PRESETS, text);
    return "";
  } catch {
    return REFUSED;
  }
}

function isPreset(preset) {
  return typeof preset?.name === "string" && preset.name !== "" && preset.values && typeof preset.values === "object";
}

function fields(values) {
  return Object.fromEntries(FIELDS.flatMap((name) => (typeof values[name] === "string" ? [[name, values[name]]] : [])));
}
