/** One line that offers to undo the last deletion. It stays until it is used, closed or replaced. */

import { byId, h } from "./dom.js";

export function offerUndo(text, undo) {
  const toast = byId("toast");
  const close = () => (toast.hidden = true);
  const button = h("button", { type: "button" }, "Undo");
  button.addEventListener("click", () => {
    close();
    undo();
  });
  const dismiss = h("button", { type: "button", "aria-label": "Close" }, "✕");
  dismiss.addEventListener("click", () => {
    close();
    byId("text").focus();
  });
  toast.replaceChildren(h("span", {}, text), button, dismiss);
  toast.hidden = false;
  button.focus(); // the button that deleted is gone
}
