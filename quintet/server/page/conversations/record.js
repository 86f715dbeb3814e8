/** One conversation as data: checks it, names it, bounds it. Messages are what Message.kept returns. */

import { areCalls } from "../messages/calls.js";
import { areFiles, copyFiles } from "../composer/text_files.js";

export const MAX_TITLE = 200; // characters
export const MAX_MESSAGES = 20_000; // more than a kept conversation can have: a message takes 95 characters
const SHOWN_TITLE = 60; // of a title made from the first message
const TEXTS = ["content", "name", "reasoning", "stats", "state", "took"];

/** A clean copy of a conversation: known fields alone. Throws an error that names what is wrong and its place. */
export function readRecord(value) {
  if (!value || typeof value !== "object" || !Array.isArray(value.messages)) throw new Error("has no list of messages");
  if (value.messages.length > MAX_MESSAGES) throw new Error(`has more than ${MAX_MESSAGES} messages`);
  const { title = "", updated = 0, draft = "", files = [] } = value;
  if (typeof title !== "string") throw new Error("has a title that is not text");
  if (typeof draft !== "string") throw new Error("has a draft that is not text");
  if (!areFiles(files)) throw new Error("has attached files that are not names with texts");
  return {
    title: oneLine(title).slice(0, MAX_TITLE),
    updated: Number.isFinite(updated) ? updated : 0,
    messages: value.messages.map(readMessage),
    draft,
    files: copyFiles(files),
  };
}

function readMessage(message, at) {
  const wrong = (reason) => new Error(`has a message that cannot be read: number ${at + 1} ${reason}`);
  if (!message || typeof message !== "object") throw wrong("is not an object");
  if (!["user", "assistant"].includes(message.role)) throw wrong("has a role other than user or assistant");
  if (typeof message.content !== "string") throw wrong("has no text");
  const { calls, files, context } = message;
  const copy = { role: message.role };
  for (const name of TEXTS) {
    if (!["string", "undefined"].includes(typeof message[name])) throw wrong(`has a ${name} that is not text`);
    if (message[name] !== undefined) copy[name] = message[name];
  }
  if (calls !== undefined && !areCalls(calls)) throw wrong("has tool calls that are not complete");
  if (calls?.length) copy.calls = calls.map(copyCall);
  if (files !== undefined && !areFiles(files)) throw wrong("has attached files that are not names with texts");
  if (files?.length) copy.files = copyFiles(files);
  if (Number.isFinite(context)) copy.context = context;
  return copy;
}

function copyCall({ id, name, arguments: text, result }) {
  return { id, name, arguments: text, result: typeof result === "string" ? result : null };
}

/** The title that the user gave, else the beginning of the first message. */
export function titleOf({ title, messages, draft, files }) {
  if (title) return title;
  const first = messages.find(({ role }) => role === "user");
  const text = oneLine(first?.content || first?.files?.[0]?.name || draft || files[0]?.name || "");
  return text.length > SHOWN_TITLE ? `${text.slice(0, SHOWN_TITLE)}…` : text || "New conversation";
}

/** All text of a conversation that search looks at. */
export function textOf(record) {
  const parts = record.messages.flatMap(({ content, files = [] }) => [content, ...files.flatMap(fileText)]);
  return [...parts, record.draft, ...record.files.flatMap(fileText)].join("\n");
}

function fileText({ name, text = "" }) {
  return [name, text];
}

export function oneLine(text) {
  return text.replace(/[\s\p{Cc}]+/gu, " ").trim();
}

/** The end of a conversation that has room for so many characters of JSON, from a question on. */
export function bounded(messages, room) {
  let from = messages.length;
  while (from > 0 && (room -= JSON.stringify(messages[from - 1]).length + 1) >= 0) from--;
  while (from > 0 && from < messages.length && messages[from].role !== "user") from++;
  return messages.slice(from);
}
