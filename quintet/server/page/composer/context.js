/** The context gauge: how much of the model's context the conversation takes. */

import { countTokens } from "../api.js";
import { byId } from "../dom.js";

const PAUSE = 400; // ms without a key, before the server is asked to count
const NEARLY = 0.9; // of the context
const ABSENT = [404, 405, 501]; // a server without /tokenize is not asked again
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export class ContextGauge {
  #timer = null;
  #abort = null;
  #countable = true;

  /**
   * `picker` has the model and its length. `request()` is the body for /tokenize, or null where the usage of the last
   * answer is exact; `usage()` is that usage, or null.
   */
  constructor(picker, request, usage) {
    this.picker = picker;
    this.request = request;
    this.usage = usage;
  }

  /** Shows what the server counted for the last answer; where that is not all, has it count after a pause. */
  update() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    const asks = this.#countable && this.picker.isLoaded && !this.picker.isEmpty && this.request() !== null;
    if (asks) this.#timer = setTimeout(() => this.#count(), PAUSE);
    else this.#draw(this.usage());
  }

  async #count() {
    const body = this.request();
    if (!body) return this.#draw(this.usage());
    this.#abort = new AbortController();
    const { signal } = this.#abort;
    try {
      const count = await countTokens(body, signal);
      if (!signal.aborted) this.#draw(Number.isFinite(count) ? count : this.usage());
    } catch (error) {
      if (signal.aborted) return;
      if (ABSENT.includes(error.status)) this.#countable = false;
      this.#draw(this.usage());
    }
  }

  #draw(used) {
    const most = this.picker.maxModelLen;
    byId("context").hidden = used === null;
    if (used === null) return;
    const share = most ? used / most : 0;
    byId("context-bar").hidden = !most;
    byId("context-bar").value = Math.min(1, share);
    const note = share > 1 ? ", too long for this model" : share > NEARLY ? ", nearly full" : "";
    byId("context-text").textContent = `${whole.format(used)}${most ? ` of ${whole.format(most)}` : ""} tokens${note}`;
    byId("context").classList.toggle("nearly", share > NEARLY);
  }
}
