/** Key shortcuts, and the dialog that lists them. */

import { byId, h } from "./dom.js";

const MAC = /mac|iphone|ipad/i.test(navigator.platform);
const FIELDS = "input, textarea, select, [contenteditable]";

/** Binds the shortcuts. `actions` has a function for each name below; one that returns false did not use the key. */
export function bindShortcuts(actions) {
  const shortcuts = [
    { key: "o", control: true, shift: true, name: "New conversation", act: actions.begin },
    { key: "k", control: true, name: "Search conversations", act: actions.search },
    { key: "Escape", name: "Stop the answer", act: actions.stop },
    { key: "ArrowUp", shown: "↑", name: "Edit the last question (from the empty field)", act: actions.editLast },
    { key: "/", outside: true, name: "Go to the message field", act: actions.focus },
    { key: "?", outside: true, name: "Show this list", act: () => byId("shortcuts").showModal() },
  ];
  const fixed = [["Enter", "Send"], ["Shift + Enter", "Begin a new line"]];
  const rows = [...fixed, ...shortcuts.map((shortcut) => [keysOf(shortcut), shortcut.name])];
  byId("shortcut-list").replaceChildren(
    ...rows.map(([keys, name]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("kbd", {}, keys)))),
  );
  byId("help").addEventListener("click", () => byId("shortcuts").showModal());
  byId("shortcuts-close").addEventListener("click", () => byId("shortcuts").close());
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || event.altKey || byId("shortcuts").open) return;
    const shortcut = shortcuts.find((each) => matches(each, event));
    if (shortcut && shortcut.act(event) !== false) event.preventDefault();
  });
}

function matches({ key, control = false, shift, outside = false }, event) {
  if (event.key.toLowerCase() !== key.toLowerCase() || (event.ctrlKey || event.metaKey) !== control) return false;
  if (shift !== undefined && event.shiftKey !== shift) return false;
  return !outside || !event.target.closest?.(FIELDS);
}

function keysOf({ key, shown = key, control, shift }) {
  const letter = shown.length === 1 ? shown.toUpperCase() : shown;
  const parts = [control && (MAC ? "⌘" : "Ctrl"), shift && "Shift", letter === "Escape" ? "Esc" : letter];
  return parts.filter(Boolean).join(" + ");
}
