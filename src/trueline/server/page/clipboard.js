// What is copied, and that it was.

import { element } from "./dom.js";
import { say } from "./notices.js";

export async function copyText(text) {
  say((await copied(text)) ? "Copied" : "The browser does not let the page copy", { shown: true });
}

/** Browsers give the clipboard to https and to this machine's own servers; others have the old way. */
async function copied(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  const before = document.activeElement;
  const field = element("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const worked = document.execCommand("copy");
  field.remove();
  before?.focus();
  return worked;
}
