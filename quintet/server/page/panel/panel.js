/** The live panel: asks for the server's metrics once a second while the tab is seen, and draws them. */

import { request } from "../api.js";
import { byId } from "../dom.js";
import { History, parse } from "./metrics.js";

const EVERY = 1000; // ms
const LOCKED = 10_000; // while a key is missing: giving one asks at once
const WIDTH = 60; // the chart's seconds
const HEIGHT = 20;
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export class Panel {
  #history = new History();
  #timer = null;
  #asking = false;

  /** `on.seen()` tells that the server answered, `on.refused(error)` that it did not. */
  constructor(on) {
    this.on = on;
    document.addEventListener("visibilitychange", () => this.#turn());
    this.#turn();
  }

  /** Asks now, as when a key was given. */
  ask() {
    clearTimeout(this.#timer);
    return this.#poll();
  }

  #turn() {
    clearTimeout(this.#timer);
    if (document.visibilityState === "visible") this.#poll();
  }

  async #poll() {
    if (this.#asking) return;
    this.#asking = true;
    let wait = EVERY;
    try {
      const text = await (await request("metrics", { signal: AbortSignal.timeout(5 * EVERY) })).text();
      this.#history.push(performance.now() / 1000, parse(text));
      this.#draw();
      byId("stale").textContent = "";
      this.on.seen();
    } catch (error) {
      if (error.status === 401) wait = LOCKED;
      byId("stale").textContent = error.status ? error.message : "The server does not answer. Trying again.";
      this.on.refused(error);
    } finally {
      this.#asking = false;
      clearTimeout(this.#timer);
      if (document.visibilityState === "visible") this.#timer = setTimeout(() => this.#poll(), wait);
    }
  }

  #draw() {
    const history = this.#history;
    const rates = history.rates("vllm:generation_tokens_total");
    const rate = rates.at(-1)?.[1];
    const running = count(history.value("vllm:num_requests_running"));
    const queue = count(history.value("vllm:num_requests_waiting"));
    show("throughput", rate === undefined ? "–" : pace(rate));
    show("brief", `${rate === undefined ? "" : `${pace(rate)} tokens/s · `}${running} running`);
    show("running", running);
    show("waiting", queue);
    show("step", count(history.value("quintet:step_tokens")));
    show("ttft", duration(history.timeToFirstToken));
    show("prompted", short(history.value("vllm:prompt_tokens_total")));
    show("generated", short(history.value("vllm:generation_tokens_total")));
    show("preemptions", count(history.value("vllm:num_preemptions_total")));
    share("kv", history.kvUsage);
    share("hits", history.prefixHits);
    const [used, pages] = [history.value("quintet:kv_pages_used"), history.value("quintet:kv_pages_total")];
    show("pages", pages === undefined ? "" : `${count(used)} of ${count(pages)} pages`);
    const queries = history.value("vllm:prefix_cache_queries_total");
    show("hits-of", queries ? `of ${short(queries)} tokens looked up` : "");
    chart(rates);
  }
}

/** The line of the last minute. Its height is the highest rate, so that the shape shows at any speed. */
function chart(rates) {
  const peak = Math.max(1, ...rates.map(([, rate]) => rate));
  const points = rates.map(([ago, rate]) => [WIDTH - ago, HEIGHT * (1 - 0.95 * (rate / peak))]);
  const text = points.map((point) => point.map((x) => x.toFixed(2)).join(",")).join(" ");
  byId("line").setAttribute("points", text);
  const ends = points.length ? [points[0][0], points.at(-1)[0]].map((x) => x.toFixed(2)) : [];
  byId("area").setAttribute("points", points.length ? `${ends[0]},${HEIGHT} ${text} ${ends[1]},${HEIGHT}` : "");
  show("peak", rates.length ? `peak ${pace(peak)} tokens/s` : "");
}

function show(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

function share(id, value) {
  show(id, value === undefined ? "–" : `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)}%`);
  byId(`${id}-bar`).value = Math.min(1, value ?? 0);
}

function count(value) {
  return value === undefined ? "–" : whole.format(value);
}

function short(value) {
  return value === undefined ? "–" : value < 100_000 ? whole.format(value) : compact.format(value);
}

function pace(rate) {
  return rate < 100 ? rate.toFixed(1) : whole.format(rate);
}

function duration(seconds) {
  if (seconds === undefined) return "–";
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`;
}
