/** Text and PDF files for a message: reads and bounds them, and writes them into the prompt. */

import { pdfText } from "../api.js";
import { isPictureFile } from "./pictures.js";

export const MAX_FILES = 10; // of a message
export const MAX_BYTES = 500_000; // of a message's files together
const MAX_NAME = 120;
const PDF_MARK = "%PDF-";
const MARKS = [["utf-16le", [0xff, 0xfe]], ["utf-16be", [0xfe, 0xff]]];

/** Reads a file as text; throws an error that says why it cannot be attached. `used`: bytes of the other files. */
export async function readTextFile(file, used) {
  const name = cleanName(file.name);
  const isPdf = String.fromCharCode(...(await bytesIn(file.slice(0, PDF_MARK.length), name))) === PDF_MARK;
  if (!isPdf && used + file.size > MAX_BYTES) throw tooLarge(name, file.size, used);
  const text = isPdf ? await textOfPdf(file, name) : decode(await bytesIn(file, name));
  if (text === null) throw new Error(`${name} is not a text file (UTF-8). Attach text, such as .txt, .md or .py.`);
  const length = bytesOf([{ text }]); // of UTF-16 it may be more
  if (used + length > MAX_BYTES) throw tooLarge(name, length, used);
  return { name, text };
}

async function bytesIn(blob, name) {
  const bytes = await blob.arrayBuffer().then((buffer) => new Uint8Array(buffer), () => null);
  if (!bytes) throw new Error(`${name} cannot be read: it is a folder, or the browser may not open it.`);
  return bytes;
}

/** The server extracts it. */
async function textOfPdf(file, name) {
  try {
    return await pdfText(file);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

function tooLarge(name, bytes, used) {
  const rest = used ? `, and the other files have ${size(used)}` : "";
  const most = `the files of a message may have ${size(MAX_BYTES)} together`;
  return new Error(`${name} has ${size(bytes)}${rest}; ${most}. Attach a part of it.`);
}

/** True for a list of names with texts, or with pictures' data URLs, within the bounds. */
export function areFiles(list) {
  return Array.isArray(list) && list.length <= MAX_FILES
    && list.every((file) => file && (isPictureFile(file) || (typeof file.name === "string" && typeof file.text === "string")))
    && bytesOf(list) <= MAX_BYTES;
}

/** Copies of files, with their known fields alone. */
export function copyFiles(list) {
  return list.map(({ name, text, url }) => (url ? { name, url } : { name, text }));
}

/** Those of these files, from the first on, that a message takes together. */
export function fitting(files) {
  return files.reduce((list, file) => (areFiles([...list, file]) ? [...list, file] : list), []);
}

export function bytesOf(files) {
  return files.reduce((sum, { text = "" }) => sum + new Blob([text]).size, 0);
}

/** The content of a message: each file in a code block under its name, then the text. */
export function withFiles(text, files) {
  if (!files.length) return text;
  return [...files.map(block), text].filter(Boolean).join("\n\n");
}

export function size(bytes) {
  return bytes < 1000 ? `${bytes} B` : `${(bytes / 1000).toFixed(bytes < 10_000 ? 1 : 0)} KB`;
}

/** A fence longer than any in the text, so that a file cannot end its own block. */
function block({ name, text }) {
  const runs = text.match(/`{3,}/g) ?? [];
  const fence = "`".repeat(Math.max(2, ...runs.map((run) => run.length)) + 1);
  return `File: ${name}\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** A name on one line, without characters that change the direction of what follows. */
function cleanName(name) {
  return name.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]+/gu, " ").trim().slice(0, MAX_NAME) || "file";
}

/** The text of UTF-8, or of UTF-16 with its mark; null for any other bytes. */
function decode(bytes) {
  const encoding = MARKS.find(([, mark]) => mark.every((byte, at) => bytes[at] === byte))?.[0] ?? "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}
