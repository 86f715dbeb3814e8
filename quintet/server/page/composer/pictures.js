/** Pictures for a message: reads and bounds them, and writes them into the content that the API takes. */

import { withFiles } from "./text_files.js";

export const MAX_URL = 700_000; // characters of a picture's data URL; the browser keeps few million of all conversations
const KEPT = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // sent as they are, where they are small
const SIDES = [1536, 1024, 640]; // px of the longer side, tried one after the other
const DATA = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/;

/** True for a file that the browser takes for a picture. */
export function isPicture(file) {
  return file.type.startsWith("image/") && file.type !== "image/svg+xml";
}

/** A picture as { name, url }; a large one is made smaller. Throws an error that says why it cannot be attached. */
export async function readPicture(file) {
  const name = file.name.slice(0, 120) || "picture";
  if (KEPT.includes(file.type) && file.size < (MAX_URL / 4) * 3 - 100) {
    const url = await dataUrl(file);
    if (DATA.test(url) && (await decodes(url))) return { name, url };
  }
  const image = await createImageBitmap(file).catch(() => null);
  if (!image) throw new Error(`${name} is not a picture that this browser can read. Attach a PNG, JPEG or WebP file.`);
  for (const side of SIDES) {
    const url = drawn(image, side);
    if (url.length <= MAX_URL) return { name, url };
  }
  throw new Error(`${name} is too large, even when it is made smaller.`);
}

/** True for what readPicture() returns. */
export function isPictureFile({ name, url }) {
  return typeof name === "string" && typeof url === "string" && url.length <= MAX_URL && DATA.test(url);
}

/** The content of a message: text, or its pictures and then the text. */
export function contentOf(text, files) {
  const pictures = files.filter(({ url }) => url);
  const words = withFiles(text, files.filter(({ url }) => !url));
  if (!pictures.length) return words;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return words ? [...parts, { type: "text", text: words }] : parts;
}

function dataUrl(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onloadend = () => resolve(String(reader.result ?? ""));
    reader.readAsDataURL(file);
  });
}

function decodes(url) {
  const image = new Image();
  image.src = url;
  return image.decode().then(() => true, () => false);
}

/** A JPEG of at most so many pixels a side; what is transparent is white. */
function drawn(image, side) {
  const scale = Math.min(1, side / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.85);
}
