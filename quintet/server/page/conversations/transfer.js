/** Conversations as files: JSON that can be imported again, and Markdown to read. */

import { withFiles } from "../composer/text_files.js";
import { h } from "../dom.js";
import { split } from "../messages/thinking.js";
import { oneLine, readRecord, titleOf } from "./record.js";
import { MAX_COUNT } from "./store.js";

const FORMAT = "quintet.conversations";
const VERSION = 1;
export const MAX_FILE = 16_000_000; // bytes: all that the page can keep, where a character takes four
const MAX_NAME = 60; // characters of a file's name

/** Has the browser save conversations as a file of this kind, "json" or "md". */
export function download(records, kind) {
  const text = kind === "json" ? toJson(records) : records.map(toMarkdown).join("\n---\n\n");
  const name = records.length === 1 ? fileName(titleOf(records[0])) : "conversations";
  const type = kind === "json" ? "application/json" : "text/markdown";
  const address = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: address, download: `${name}.${kind}` }).click();
  setTimeout(() => URL.revokeObjectURL(address)); // the download has begun by then
}

export function toJson(records) {
  const conversations = records.map(({ id, ...record }) => record);
  return `${JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1)}\n`;
}

export function toMarkdown(record) {
  const time = record.updated ? [`*${new Date(record.updated).toISOString().slice(0, 16).replace("T", " ")} UTC*`] : [];
  return `${[`# ${titleOf(record)}`, ...time, ...record.messages.map(section)].join("\n\n")}\n`;
}

function section({ role, name, content, reasoning, calls = [], files = [] }) {
  const { thought, answer } = role === "user" ? { thought: "", answer: content } : split(content);
  const thoughts = [reasoning, thought].filter((text) => text?.trim()).join("\n\n");
  const quote = thoughts && thoughts.trim().split("\n").map((line) => `> ${line}`).join("\n");
  const called = calls.map((call) => `Calls \`${oneLine(call.name)}\` with \`${oneLine(call.arguments)}\``
    + (call.result === null ? "" : `; result:\n\n${withFiles("", [{ name: call.name, text: call.result }])}`));
  const heading = `## ${role === "user" ? "You" : oneLine(name || "Assistant")}`;
  return [heading, quote, withFiles(answer, files), ...called].filter(Boolean).join("\n\n");
}

/** The conversations of an exported file. Throws an error that says what is wrong with it, and then takes none. */
export async function readExport(file) {
  const megabytes = Math.ceil(file.size / 1e6);
  if (file.size > MAX_FILE) throw new Error(`it has ${megabytes} MB; at most ${MAX_FILE / 1e6} MB are read`);
  const data = parsed(await file.text());
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error(`it is not an export of this page: "format" is not "${FORMAT}"`);
  }
  if (data.version !== VERSION) throw new Error(`its version is not ${VERSION}: a newer page wrote it`);
  if (data.conversations.length > MAX_COUNT) throw new Error(`it has more than ${MAX_COUNT} conversations`);
  return data.conversations.map((value, at) => {
    try {
      return readRecord(value);
    } catch (error) {
      throw new Error(`conversation ${at + 1} ${error.message}`);
    }
  });
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("it is not JSON, or a part of it is missing");
  }
}

/** Without characters that a file system refuses or that hide the file. */
function fileName(title) {
  const safe = oneLine(title.replace(/[\p{Cc}\p{Cf}<>:"/\\|?*]+/gu, " ")).replace(/^[. ]+/, "");
  return safe.slice(0, MAX_NAME).trim() || "conversation";
}
