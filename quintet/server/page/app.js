/** The page: joins the chat, the panel, the parameters, the choice of model and the key. */

import { storeKey } from "./api.js";
import { Chat } from "./chat.js";
import { Attachments } from "./composer/attachments.js";
import { ContextGauge } from "./composer/context.js";
import { Microphone } from "./composer/microphone.js";
import { ConversationList } from "./conversations/list.js";
import { Store } from "./conversations/store.js";
import { byId } from "./dom.js";
import { ModelPicker } from "./model_picker.js";
import { Panel } from "./panel/panel.js";
import { Presets } from "./parameters/presets.js";
import { loadServed } from "./parameters/served.js";
import { Settings } from "./parameters/settings.js";
import { bindShortcuts } from "./shortcuts.js";

const WRONG_KEY = "The server does not know this key. It was started with another one (--api-key): ask for that.";
const WIDE = matchMedia("(min-width: 900px)"); // as in style.css
const text = byId("text");

const settings = new Settings(() => chat.redraw());
const picker = new ModelPicker(named);
const store = new Store(changed);
const shown = () => gauge.update();
const chat = new Chat(settings, picker, store, { busy, refused, back, failed, draft, unkept, shown });
const attachments = new Attachments({ changed: () => gauge.update(), failed, sees: () => picker.sees });
const gauge = new ContextGauge(picker, uncounted, () => chat.context);
const list = new ConversationList(store, { opened: () => chat.id, open, keep: () => chat.keep() });
let asking = false; // for the list of models
let warned = false; // that conversations are not kept

function busy(flag, answer) {
  byId("send").hidden = flag;
  byId("stop").hidden = !flag;
  byId("status").textContent = flag ? "The answer is coming." : `The answer is ${answer.state}.`;
  if (flag) failed("");
  else {
    if (isIdle()) field().focus({ preventScroll: true });
    gauge.update();
    if (picker.hasStates) loadModels(); // one may have been loaded for this answer, or unloaded
  }
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

/** Puts a text that got no answer before what was typed since, and its files. */
function back(unanswered, files = []) {
  text.value = [unanswered, text.value].filter((each) => each.trim()).join("\n\n");
  attachments.restore(files);
  grow();
}

/** Puts what was spoken behind what was typed. */
function heard(words) {
  text.value = [text.value.trimEnd(), words].filter(Boolean).join(" ");
  text.dispatchEvent(new Event("input"));
  text.focus();
}

/** The message that is being written. */
function draft() {
  return { text: text.value, files: attachments.list };
}

/** Shows another conversation, or a new one for null; the shown one is kept. */
function open(id) {
  chat.keep();
  show(chat.open(id));
  failed("");
  if (!WIDE.matches) showHistory(false);
  text.focus();
}

/** Draft and files of the conversation that is shown now. */
function show({ draft, files }) {
  text.value = draft;
  attachments.take();
  attachments.restore(files);
  grow();
  list.draw();
}

/** Records of the store have changed, in this tab or in another. */
function changed() {
  if (chat.sync()) show(chat.open(null));
  list.draw();
}

/** The body of /tokenize for what no answer has counted; null where there is nothing of that kind. */
function uncounted() {
  const unsent = text.value.trim() !== "" || attachments.list.length > 0;
  const messages = chat.turns(text.value, attachments.list);
  if ("transcribes" in document.body.dataset) return null; // such a model has no chats
  const seen = messages.some(({ content }) => Array.isArray(content)); // /tokenize counts text
  if (seen || chat.busy || !messages.length || (!unsent && chat.context !== null)) return null;
  const { tools } = settings.fields();
  return { model: picker.model, messages, ...(tools ? { tools } : {}) };
}

/** Reports once that the browser keeps nothing; the list shows it as long as it is so. */
function unkept(reason) {
  byId("history-note").textContent = reason;
  if (reason && !warned) failed(reason);
  warned = reason !== "";
}

function showHistory(flag) {
  byId("history").hidden = !flag;
  byId("history-button").setAttribute("aria-expanded", String(flag));
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

/** Shows what depends on the chosen model. */
function named() {
  gauge.update();
  document.title = [picker.name, "quintet"].filter(Boolean).join(" · ");
}

async function loadModels() {
  if (asking) return;
  asking = true;
  try {
    await picker.load();
    named();
    await loadServed();
  } catch (error) {
    refused(error);
  } finally {
    asking = false;
  }
}

async function send() {
  await attachments.ready;
  if (!text.value.trim() && !attachments.list.length) return;
  if (!chat.send(text.value, attachments.list)) return;
  text.value = "";
  attachments.take();
  grow();
}

/** The field is as high as its text, up to what style.css allows. */
function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

text.addEventListener("input", () => {
  grow();
  gauge.update();
});
text.addEventListener("keydown", (event) => {
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
byId("clear").addEventListener("click", () => open(null));
byId("history-button").addEventListener("click", () => showHistory(byId("history").hidden));
byId("model").addEventListener("focus", () => picker.hasStates && loadModels());
bindShortcuts({
  begin: () => open(null),
  search: () => {
    showHistory(true);
    byId("search").select();
  },
  stop: () => chat.busy && chat.stop(),
  editLast: ({ target }) => target === text && text.value === "" && chat.editLast(),
  focus: () => text.focus(),
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

addEventListener("pagehide", () => chat.keep());
document.addEventListener("visibilitychange", () => document.hidden && chat.keep()); // phones do not send pagehide

new Presets(settings);
new Microphone({ heard, failed });
show(chat.restore());
showHistory(WIDE.matches);
byId("live").open = WIDE.matches;
const panel = new Panel({ seen: () => picker.isEmpty && loadModels(), refused });
loadModels();
