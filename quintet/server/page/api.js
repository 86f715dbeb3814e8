/** Talks to the server: the API key, errors in OpenAI's shape, and answers as they stream in. */

import { EventParser } from "./stream.js";

const KEY = "quintet.api-key";
const SILENT = "The server does not answer. If it has stopped, start it again, then send again.";
const TORN = "The connection ended before the answer did. If the server has stopped, start it again, then regenerate.";
const NO_KEY = "The server asks for an API key. Give it above, then send again.";
const WRONG_KEY = "The server does not know this API key. Give the right one above, then send again.";
const GATEWAY = [502, 503, 504]; // what a proxy says when the server behind it is gone

/** What went wrong with a request, in words for the reader. */
export class ApiError extends Error {
  constructor(message, status = 0, keyed = false) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.keyed = keyed; // whether a key was sent
  }
}

/** The key of this tab; sessionStorage forgets it with the tab. */
export function storeKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** A response whose status is good. The path is relative, so that the page works behind a prefix. */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await fetch(path, { cache: "no-store", ...options, headers }).catch((error) => silent(error, options));
  if (response.ok) return response;
  const error = new ApiError(await reason(response, key), response.status, key !== null);
  if (error.status === 401 && key !== sessionStorage.getItem(KEY)) return request(path, options); // one came meanwhile
  throw error;
}

/** The models that are served, as /v1/models lists them. */
export async function models() {
  const { data } = await (await request("v1/models")).json();
  return data.filter((model) => typeof model?.id === "string");
}

/** Tokens of a conversation by the model's chat template. */
export async function countTokens(body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await request("tokenize", { method: "POST", headers, body: JSON.stringify(body), signal });
  return (await response.json()).count;
}

/** The text of a PDF file, as the server extracts it. */
export async function pdfText(file) {
  const headers = { "Content-Type": "application/pdf" };
  const response = await request("page/pdf_text", { method: "POST", headers, body: file });
  return (await response.json()).text;
}

/** The text of an audio file, by a server whose model transcribes. */
export async function transcribe(file) {
  const body = new FormData();
  body.append("file", file, "recording.wav");
  return (await (await request("v1/audio/transcriptions", { method: "POST", body })).json()).text;
}

/** The chunks of one streamed chat completion; returns after [DONE], and throws on an error or a torn stream. */
export async function* complete(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const { data } of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = parsed(data);
    if (chunk.error) throw new ApiError(chunk.error.message ?? String(chunk.error));
    yield chunk;
  }
  throw new ApiError(TORN);
}

/** A request that was taken back stays that; of any other without a response the browser says nothing that helps. */
function silent(error, { signal }) {
  throw signal?.aborted ? error : new ApiError(SILENT);
}

async function* events(stream) {
  const parser = new EventParser();
  const decoder = new TextDecoder(); // a character may be cut by the chunks, so it is decoded across them
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(torn);
      yield* parser.push(decoder.decode(value, { stream: !done }), done);
      if (done) return;
    }
  } finally {
    // A reader that stops lets go of the connection; a stream that failed has nothing to cancel.
    reader.cancel().catch(() => undefined);
  }
}

function torn(error) {
  throw error.name === "AbortError" ? error : new ApiError(TORN);
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError(`The server sent what is no JSON: ${data.slice(0, 80)}`);
  }
}

async function reason(response, key) {
  if (response.status === 401) return key === null ? NO_KEY : WRONG_KEY;
  const text = await response.text();
  const wait = response.headers.get("Retry-After");
  const later = wait ? ` Try again in ${wait} s.` : "";
  try {
    const { code, message } = JSON.parse(text).error;
    return (code === "context_length_exceeded" ? tooLong(message) : message) + later;
  } catch {
    if (GATEWAY.includes(response.status)) return SILENT;
    return `${response.status} ${response.statusText}${later}`.trim();
  }
}

function tooLong(message) {
  const most = /maximum context length is (\d+)/.exec(message)?.[1];
  const size = most ? `, which takes at most ${most} tokens` : "";
  return `This conversation is too long for the model${size}. Shorten the message, delete the last turns, or begin anew.`;
}
