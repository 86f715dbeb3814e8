/** The page: joins the chat, the panel, the parameters, the choice of model and the key. */

import { models, storeKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Panel } from "./panel.js";
import { loadServed } from "./served.js";
import { Settings } from "./settings.js";

const WRONG_KEY = "The server does not know this key. It was started with another one (--api-key): ask for that.";
const WIDE = "(min-width: 900px)"; // as in style.css
const picker = byId("model");
const text = byId("text");

const settings = new Settings(() => chat.redraw());
const chat = new Chat(settings, () => picker.value, { busy, refused, back, failed });
let asking = false; // for the list of models

function busy(flag, answer) {
  byId("send").hidden = flag;
  byId("stop").hidden = !flag;
  byId("status").textContent = flag ? "The answer is coming." : `The answer is ${answer.state}.`;
  if (flag) failed("");
  else if (isIdle()) field().focus({ preventScroll: true });
}

/** Whether the reader is nowhere else, as in the panel's fields. */
function isIdle() {
  const focused = document.activeElement;
  return !focused || focused === document.body || !focused.checkVisibility();
}

/** Where the reader writes: a question that he edits, else the next one. */
function field() {
  return document.querySelector(".edit textarea, .calls textarea") ?? text;
}

/** Puts a text that got no answer before what was typed since. */
function back(unanswered) {
  text.value = [unanswered, text.value].filter((each) => each.trim()).join("\n\n");
  grow();
}

function failed(reason) {
  byId("notice").textContent = reason;
  byId("notice").hidden = !reason;
}

/** A server that wants a key gets a field for it, whichever request found out. */
function refused(error) {
  const form = byId("key-form");
  if (error.status !== 401 || !form.hidden) return;
  byId("key-error").textContent = error.keyed ? WRONG_KEY : "";
  form.hidden = false;
  byId("key").focus();
}

async function loadModels() {
  if (asking) return;
  asking = true;
  try {
    const names = await models();
    picker.replaceChildren(...names.map((name) => new Option(name, name)));
    picker.disabled = names.length === 0;
    document.title = [...names.slice(0, 1), "quintet"].join(" · ");
    await loadServed();
  } catch (error) {
    refused(error);
  } finally {
    asking = false;
  }
}

function send() {
  if (!text.value.trim() || !chat.send(text.value)) return;
  text.value = "";
  grow();
}

/** The field is as high as its text, up to what style.css allows. */
function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => chat.stop());
for (const example of byId("examples").querySelectorAll("button")) {
  example.addEventListener("click", () => chat.send(example.textContent));
}
byId("clear").addEventListener("click", () => {
  chat.clear();
  failed("");
  text.focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  text.focus();
  loadModels();
  panel.ask();
});

addEventListener("pagehide", () => chat.keep(text.value));
document.addEventListener("visibilitychange", () => document.hidden && chat.keep(text.value)); // phones say no more

back(chat.restore());
for (const id of ["live", "settings"]) byId(id).open = matchMedia(WIDE).matches;
const panel = new Panel({ seen: () => picker.disabled && loadModels(), refused });
loadModels();
