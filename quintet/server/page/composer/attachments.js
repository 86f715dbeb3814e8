/** The files of the message that is being written: by button, drag or paste, shown as chips. */

import { byId, h } from "../dom.js";
import { isPicture, readPicture } from "./pictures.js";
import { MAX_FILES, bytesOf, fitting, readTextFile, size } from "./text_files.js";

export class Attachments {
  list = [];
  ready = Promise.resolve(); // when all files that were given so far are read
  #chips = byId("files");
  #input = byId("file");

  /**
   * `on.changed()`: the list is another. `on.failed(reason)`: files were not attached; empty where all were.
   * `on.sees()`: whether the model takes pictures.
   */
  constructor(on) {
    this.on = on;
    byId("attach").addEventListener("click", () => this.#input.click());
    this.#input.addEventListener("change", () => {
      const files = [...this.#input.files];
      this.#input.value = ""; // the same file may be chosen again
      this.add(files);
    });
    byId("text").addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      if (!files.length || types.includes("text/plain")) return; // a table is pasted as text, not as its picture
      event.preventDefault();
      this.add([...files]);
    });
    this.#takeDrops(document.documentElement);
  }

  /** Attaches those that can be, one after the other; reports the reason of each other one. */
  add(files) {
    this.ready = this.ready.then(() => this.#read(files));
  }

  async #read(files) {
    const reasons = [];
    byId("attach").textContent = "…"; // the server may take seconds for a PDF
    for (const file of files) {
      try {
        if (this.list.length >= MAX_FILES) throw new Error(`A message takes ${MAX_FILES} files. Remove one first.`);
        this.list.push(await this.#attached(file));
      } catch (error) {
        if (!reasons.includes(error.message)) reasons.push(error.message);
      }
    }
    byId("attach").textContent = "+";
    this.#draw();
    this.on.failed(reasons.slice(0, 3).join(" "));
    byId("text").focus();
  }

  async #attached(file) {
    if (!isPicture(file)) return readTextFile(file, bytesOf(this.list));
    if (!this.on.sees()) throw new Error(`${file.name} is a picture, and this model takes text alone.`);
    return readPicture(file);
  }

  /** Puts files of a draft or of a taken-back message before the others; those beyond the bounds are left out. */
  restore(files = []) {
    this.list = fitting([...files, ...this.list]);
    this.#draw();
  }

  /** Empties the list, and returns it. */
  take() {
    const { list } = this;
    this.list = [];
    this.#draw();
    return list;
  }

  #draw() {
    this.#chips.replaceChildren(...this.list.map((file) => {
      const remove = h("button", { type: "button", "aria-label": `Remove ${file.name}` }, "✕");
      remove.addEventListener("click", () => {
        this.list = this.list.filter((other) => other !== file);
        this.#draw();
        byId("text").focus();
      });
      const small = file.url ? thumbnail(file) : h("small", {}, size(bytesOf([file])));
      return h("li", { class: "chip" }, h("span", {}, file.name), small, remove);
    }));
    this.#chips.hidden = this.list.length === 0;
    this.on.changed();
  }

  /** Files may be dropped anywhere: otherwise the browser would leave the page for them. */
  #takeDrops(target) {
    const mark = (flag) => document.body.classList.toggle("dropping", flag);
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    target.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(true);
    });
    target.addEventListener("dragleave", (event) => event.relatedTarget === null && mark(false));
    target.addEventListener("drop", (event) => {
      mark(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }
}

/** A picture, small. */
function thumbnail({ name, url }) {
  return h("img", { class: "thumbnail", src: url, alt: name });
}

/** A file of a message that was sent; its text unfolds, and a picture is shown. */
export function fileChip(file) {
  if (file.url) return thumbnail(file);
  const text = h("pre", { tabindex: 0, role: "region", "aria-label": `Text of ${file.name}` });
  const summary = h("summary", {}, file.name, " ", h("small", {}, size(bytesOf([file]))));
  const chip = h("details", { class: "file" }, summary, text);
  chip.addEventListener("toggle", () => (text.textContent = chip.open ? file.text : ""));
  return chip;
}
