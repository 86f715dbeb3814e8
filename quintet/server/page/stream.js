/** Reads server-sent events out of text that may be cut anywhere (WHATWG HTML, section 9.2.6). */

export class EventParser {
  #rest = "";
  #data = [];
  #type = "";

  /** The events that this piece of text completes; `last` says that no more will come. */
  push(text, last = false) {
    let rest = this.#rest + text;
    // A line feed may still follow a carriage return at the very end: it waits for the next piece.
    if (last && rest.endsWith("\r")) rest += "\n";
    const lines = rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    return lines.flatMap((line) => this.#line(line));
  }

  #line(line) {
    if (line === "") return this.#dispatch();
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    if (name === "event") this.#type = value;
    return []; // a comment (no name before the colon) and every other field say nothing to us
  }

  #dispatch() {
    const event = { type: this.#type || "message", data: this.#data.join("\n") };
    const empty = this.#data.length === 0;
    this.#data = [];
    this.#type = "";
    return empty ? [] : [event];
  }
}
