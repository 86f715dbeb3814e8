/** Reads Prometheus text, and turns counters that grow into figures of the moment. */

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(?:[^"}]|"(?:\\.|[^"\\])*")*\})?\s+(\S+)/;
const WINDOW = 60; // seconds of history
const TTFT = "vllm:time_to_first_token_seconds";

/** The sum of all samples of each name. */
export function parse(text) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    const match = SAMPLE.exec(line); // comments begin with # and do not match
    const value = match ? Number(match[2]) : NaN;
    if (Number.isFinite(value)) sums.set(match[1], (sums.get(match[1]) ?? 0) + value);
  }
  return sums;
}

/** The last minute of samples. */
export class History {
  #samples = [];

  /** Adds the figures of one moment (seconds). A counter that shrank means that the server began anew. */
  push(time, sums) {
    const last = this.#samples.at(-1);
    if (last && COUNTERS.some((name) => sums.get(name) < last.sums.get(name))) this.#samples = [];
    this.#samples = [...this.#samples.filter((sample) => sample.time >= time - WINDOW), { time, sums }];
  }

  /** What a gauge or a counter stands at; undefined where the server does not say. */
  value(name) {
    return this.#samples.at(-1)?.sums.get(name);
  }

  /** How much a counter grew over the window. */
  growth(name) {
    return difference(this.#samples[0], this.#samples.at(-1), name);
  }

  /** Growth per second from sample to sample: pairs of (seconds ago, rate), oldest first. */
  rates(name) {
    const now = this.#samples.at(-1)?.time;
    return this.#samples.slice(1).map((sample, index) => {
      const before = this.#samples[index];
      return [now - sample.time, difference(before, sample, name) / (sample.time - before.time)];
    });
  }

  /** Mean seconds to the first token over the window; undefined where no request got one. */
  get timeToFirstToken() {
    return ratio(this.growth(`${TTFT}_sum`), this.growth(`${TTFT}_count`));
  }

  /** The share of prompt tokens found in the prefix cache: over the window if there were any, else since the start. */
  get prefixHits() {
    const [queries, hits] = ["vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"];
    return ratio(this.growth(hits), this.growth(queries)) ?? ratio(this.value(hits), this.value(queries));
  }

  /** The share of the KV cache that is in use. Pages add up over models; shares do not. */
  get kvUsage() {
    return ratio(this.value("quintet:kv_pages_used"), this.value("quintet:kv_pages_total"))
      ?? this.value("vllm:kv_cache_usage_perc");
  }
}

const COUNTERS = ["vllm:generation_tokens_total", "vllm:prompt_tokens_total", `${TTFT}_count`];

function difference(from, to, name) {
  return Math.max(0, (to?.sums.get(name) ?? 0) - (from?.sums.get(name) ?? 0));
}

function ratio(part, whole) {
  return whole > 0 ? (part ?? 0) / whole : undefined;
}
