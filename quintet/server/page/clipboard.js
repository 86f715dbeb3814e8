/** Copies text, also over plain HTTP from another machine, where browsers give no clipboard. */

import { byId, h } from "./dom.js";

const SEEN = 2000; // ms for which a button says that it is done

/** A button that copies what `text()` gives when it is pressed; `what` completes its name. */
export function copyButton(what, text) {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    const done = await copy(text());
    button.textContent = done ? "Copied" : "Not copied";
    byId("status").textContent = done ? `Copied the ${what}.` : `The browser did not let the ${what} be copied.`;
    setTimeout(() => (button.textContent = "Copy"), SEEN);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // there is no clipboard, or the reader has forbidden it
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const field = h("textarea", { class: "hidden", readonly: true, "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus({ preventScroll: true });
  return done;
}
