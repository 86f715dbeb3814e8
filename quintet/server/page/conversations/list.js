/** The list of conversations: open, search, rename, delete with undo, export and import. */

import { byId, h } from "../dom.js";
import { offerUndo } from "../toast.js";
import { MAX_TITLE, oneLine, textOf, titleOf } from "./record.js";
import { download, readExport } from "./transfer.js";

const AROUND = 30; // characters before and after a match

export class ConversationList {
  #list = byId("conversations");
  #search = byId("search");
  #unfolded = null; // id of the conversation whose actions are shown

  /** `on.opened()`: id of the shown conversation. `on.open(id)` shows another, `on.keep()` keeps the shown one. */
  constructor(store, on) {
    this.store = store;
    this.on = on;
    this.#search.addEventListener("input", () => this.draw());
    this.#search.addEventListener("keydown", (event) => event.key === "Escape" && this.#leaveSearch(event));
    for (const kind of ["json", "md"]) byId(`export-${kind}`).addEventListener("click", () => this.#exportAll(kind));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", ({ target }) => {
      const [file] = target.files;
      target.value = "";
      if (file) this.#import(file);
    });
  }

  /** Draws the list again; the focus stays in its place. A title that is being written is left alone. */
  draw() {
    if (this.#list.querySelector("form")?.contains(document.activeElement)) return;
    const wanted = this.#search.value.trim().toLowerCase();
    const records = this.store.all();
    const matches = records.map((record) => [record, match(record, wanted)]).filter(([, found]) => found !== null);
    const focused = this.#list.contains(document.activeElement) ? document.activeElement.dataset : null;
    this.#list.replaceChildren(...matches.map(([record, found]) => this.#item(record, found)));
    byId("history-empty").textContent = matches.length ? "" : wanted ? "No conversation has this text." : "None yet.";
    for (const id of ["export-json", "export-md"]) byId(id).disabled = records.length === 0;
    if (focused) this.#button(focused.of, focused.act)?.focus();
  }

  #item(record, found) {
    const { id } = record;
    const title = titleOf(record);
    const unfolded = id === this.#unfolded;
    const text = [h("span", { class: "title" }, title), ...(found ? [h("span", { class: "match" }, found)] : [])];
    const open = h("button", {
      type: "button", class: "open", title, "data-of": id, "data-act": "open",
      "aria-current": id === this.on.opened() ? "true" : undefined, on: { click: () => this.on.open(id) },
    }, ...text);
    const more = h("button", {
      type: "button", class: "more", "data-of": id, "data-act": "more", "aria-label": `Actions for ${title}`,
      "aria-expanded": String(unfolded), on: { click: () => this.#unfold(unfolded ? null : id) },
    }, "⋯");
    return h("li", {}, h("div", { class: "row" }, open, more), ...(unfolded ? [this.#actions(record)] : []));
  }

  #actions(record) {
    const actions = [
      ["Rename", () => this.#rename(record)],
      ["JSON", () => this.#export([record.id], "json"), "Export as JSON"],
      ["Markdown", () => this.#export([record.id], "md"), "Export as Markdown"],
      ["Delete", () => this.#delete(record)],
    ];
    const buttons = actions.map(([name, click, label]) => {
      const attributes = { type: "button", "data-of": record.id, "data-act": name, "aria-label": label };
      return h("button", { ...attributes, on: { click } }, name);
    });
    return h("div", { class: "actions", role: "group", "aria-label": `Actions for ${titleOf(record)}` }, ...buttons);
  }

  #unfold(id) {
    this.#unfolded = id;
    this.draw();
  }

  #rename({ id }) {
    const title = titleOf(this.store.get(id));
    const field = h("input", { "aria-label": `New title for ${title}`, maxlength: MAX_TITLE, autocomplete: "off" });
    field.value = title;
    const form = h("form", { class: "rename" }, field, h("button", { type: "submit", class: "first" }, "Rename"));
    const close = () => {
      form.remove();
      this.draw();
      this.#button(id, "more")?.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const record = this.store.get(id); // another tab may have deleted it
      const { id: _, ...rest } = record ?? {};
      this.#unfolded = null;
      form.remove();
      if (record) this.#noteReason(this.store.put(id, JSON.stringify({ ...rest, title: oneLine(field.value) })));
      close();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    });
    this.#button(id, "open").closest("li").append(form);
    field.select();
  }

  #delete(record) {
    const { id } = record;
    const opened = id === this.on.opened();
    if (opened) this.on.keep(); // with what was typed, so that undo brings it back
    const text = this.store.text(id);
    this.#unfolded = null;
    if (opened) this.on.open(null);
    this.store.remove(id);
    offerUndo(`Deleted “${titleOf(record)}”.`, () => {
      this.#noteReason(this.store.put(id, text));
      if (opened) this.on.open(id);
      this.#button(id, "open")?.focus();
    });
  }

  #exportAll(kind) {
    this.on.keep();
    download(this.store.all(), kind);
  }

  #export([id], kind) {
    if (id === this.on.opened()) this.on.keep();
    const record = this.store.get(id);
    if (record) download([record], kind);
  }

  /** Conversations that are here already are not added again. */
  async #import(file) {
    try {
      const records = await readExport(file);
      const present = new Set(this.store.all().map(identity));
      const added = records.filter((record) => !present.has(identity(record)));
      const reason = this.store.addAll(added);
      if (reason) throw new Error(`there is no room for it. ${reason}`);
      const same = records.length - added.length;
      this.#note(`Imported ${counted(added.length)}${same ? `; ${counted(same)} were here already` : ""}.`);
    } catch (error) {
      this.#note(`${oneLine(file.name).slice(0, 80)} was not imported: ${error.message}.`.replace(/\.\.$/, "."));
    }
  }

  #leaveSearch(event) {
    event.stopPropagation();
    this.#search.value = "";
    this.draw();
    byId("text").focus();
  }

  #noteReason(reason) {
    if (reason) this.#note(reason);
  }

  #note(text) {
    byId("history-note").textContent = text;
  }

  #button(id, act) {
    return [...this.#list.querySelectorAll("button")].find(({ dataset }) => dataset.of === id && dataset.act === act);
  }
}

/** The text around the first match; empty where the title matches, null where nothing does. */
function match(record, wanted) {
  if (!wanted || titleOf(record).toLowerCase().includes(wanted)) return "";
  const text = textOf(record);
  const at = text.toLowerCase().indexOf(wanted);
  if (at < 0) return null;
  return `…${oneLine(text.slice(Math.max(0, at - AROUND), at + wanted.length + AROUND))}…`;
}

function identity({ title, messages }) {
  return JSON.stringify([title, messages]);
}

function counted(count) {
  return `${count} ${count === 1 ? "conversation" : "conversations"}`;
}
