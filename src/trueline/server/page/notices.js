// What the page says of itself, to those who hear it too.

import { byId } from "./dom.js";

const SHOWN = 2500;
let hiding;

/** `shown`: for a moment also to be seen. */
export function say(text, { shown = false } = {}) {
  const notice = byId("notice");
  notice.textContent = text;
  notice.classList.toggle("unseen", !shown);
  clearTimeout(hiding);
  hiding = setTimeout(() => notice.classList.add("unseen"), SHOWN);
}
