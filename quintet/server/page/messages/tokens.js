/** Shows an answer token by token: tinted by probability, with what else could have stood there. */

import { byId, h } from "../dom.js";

const SIGNS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };

/** The growing row of an answer's tokens. Tab enters it once, the arrow keys move within it. */
export class TokenRow {
  element = h("div", {
    class: "tokens",
    role: "listbox",
    "aria-orientation": "horizontal",
    "aria-label": "The answer by token; the arrow keys move",
  });
  #decoder = new TextDecoder(); // a character may be cut by tokens: it stands where its last byte came

  constructor(popup) {
    popup.watch(this.element);
  }

  append(entries, popup) {
    for (const entry of entries) {
      const first = !this.element.firstChild;
      const text = this.#text(entry);
      const token = h("span", { class: "token", role: "option", tabindex: first ? "0" : "-1" }, text);
      token.classList.toggle("part", text === "");
      token.style.setProperty("--doubt", (1 - chance(entry)).toFixed(3));
      popup.describe(token, entry);
      this.element.append(token);
    }
  }

  #text({ token, bytes }) {
    return bytes ? this.#decoder.decode(Uint8Array.from(bytes), { stream: true }) : token;
  }
}

/** The one box that names a token's alternatives, beside the token that is pointed at or has the focus. */
export class Popup {
  #box = byId("alternatives");
  #entries = new WeakMap();
  #token = null; // whose alternatives are shown

  constructor() {
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    document.addEventListener("scroll", () => this.#place(), { capture: true, passive: true });
    this.#box.addEventListener("pointerleave", () => this.hide());
  }

  describe(token, entry) {
    this.#entries.set(token, entry);
  }

  watch(row) {
    const show = ({ target }) => this.#entries.has(target) && this.#show(target);
    row.addEventListener("pointerover", show);
    row.addEventListener("focusin", show);
    row.addEventListener("focusout", () => this.hide());
    row.addEventListener("pointerout", (event) => {
      if (!this.#box.contains(event.relatedTarget)) this.hide();
    });
    row.addEventListener("keydown", (event) => move(row, event));
  }

  hide() {
    this.#box.hidden = true;
    this.#token?.removeAttribute("aria-describedby");
    this.#token = null;
  }

  #show(token) {
    this.hide();
    const entry = this.#entries.get(token);
    const others = (entry.top_logprobs ?? []).filter((other) => other.token !== entry.token);
    const rows = [entry, ...others].sort((a, b) => b.logprob - a.logprob);
    this.#box.replaceChildren(h("ol", {}, ...rows.map((row) => line(row, row === entry))));
    token.setAttribute("aria-describedby", "alternatives");
    this.#token = token;
    this.#box.hidden = false;
    this.#place();
  }

  /** Below the token, or above where there is no room; a token may be wrapped, so its first line counts. */
  #place() {
    const anchor = this.#token?.getClientRects()[0];
    if (!anchor) return;
    const { offsetWidth: width, offsetHeight: height } = this.#box;
    const left = Math.max(8, Math.min(anchor.left, innerWidth - width - 8));
    const below = anchor.bottom + height + 8 < innerHeight;
    this.#box.style.left = `${left}px`;
    this.#box.style.top = `${below ? anchor.bottom : Math.max(0, anchor.top - height)}px`;
  }
}

function line(entry, chosen) {
  const bar = h("span", { class: "share", "aria-hidden": "true" });
  bar.style.setProperty("--share", chance(entry).toFixed(4));
  const name = h("code", {}, visible(entry.token));
  return h("li", { class: chosen ? "chosen" : "" }, name, bar, h("span", { class: "percent" }, percent(chance(entry))));
}

function move(row, event) {
  const tokens = row.children;
  const at = [...tokens].indexOf(document.activeElement);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (at < 0 || next === undefined || !tokens[next]) return;
  event.preventDefault();
  tokens[at].tabIndex = -1;
  tokens[next].tabIndex = 0;
  tokens[next].focus();
}

function chance({ logprob }) {
  return Math.min(1, Math.exp(logprob));
}

function percent(share) {
  return share > 0 && share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(1)}%`;
}

function visible(text) {
  return text.replace(/[ \n\t\r]/g, (sign) => SIGNS[sign]) || "∅";
}
