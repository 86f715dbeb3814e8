/** What is known of one answer: its tokens and its pace. */

export class Facts {
  #start = performance.now();
  #first = null;
  #last = null;
  #chunks = 0;
  #usage = null;
  finish = null;

  note(chunk) {
    const choice = chunk.choices?.[0];
    const delta = choice?.delta;
    if (delta?.content || delta?.reasoning || delta?.reasoning_content || delta?.tool_calls) {
      this.#first ??= performance.now();
      this.#chunks++;
    }
    this.finish = choice?.finish_reason ?? this.finish;
    this.#usage = chunk.usage ?? this.#usage;
    this.#last = performance.now();
  }

  /** Tokens of prompt and answer together, as the server counted them; null where it did not. */
  get context() {
    return this.#usage?.total_tokens ?? null;
  }

  words() {
    if (this.#first === null) return [];
    const tokens = this.#usage?.completion_tokens ?? this.#chunks;
    const seconds = (this.#last - this.#first) / 1000;
    // An answer that came at once says nothing of the pace.
    const pace = tokens > 1 && seconds > 0.05 ? [`${((tokens - 1) / seconds).toFixed(1)} tokens/s`] : [];
    const wait = `first after ${Math.round(this.#first - this.#start)} ms`;
    return [`${tokens} ${tokens === 1 ? "token" : "tokens"}`, ...pace, wait];
  }
}
