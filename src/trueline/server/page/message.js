// How messages are shown.

import { statsLine } from "./answer.js";
import { button, element } from "./dom.js";
import { MarkdownView } from "./markdown_view.js";

/** A message in the list. `does`: what its buttons do, each called with the message. */
export class MessageView {
  constructor(message, does) {
    this.message = message;
    this.does = does;
    this.content = element("div", { class: "content" });
    this.markdown = message.role === "assistant" ? new MarkdownView(this.content) : null;
    this.error = element("p", { class: "error", role: "alert", hidden: true });
    this.stats = element("span", { class: "stats" });
    this.node = element(
      "li",
      { class: `message ${message.role}` },
      element("h2", { class: "unseen" }, message.role === "user" ? "You" : "Model"),
      this.content,
      this.error,
      element("div", { class: "foot" }, this.stats, this.#buttons()),
    );
    this.update();
  }

  /** Shows what is new of the message. */
  update() {
    const { content, error } = this.message;
    if (this.markdown) this.markdown.update(content);
    else this.content.textContent = content;
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.stats.textContent = statsLine(this.message);
  }

  set busy(value) {
    this.node.setAttribute("aria-busy", value);
  }

  #buttons() {
    const { message, does } = this;
    const copy = button("Copy", () => does.copy(message));
    const other = message.role === "user"
      ? button("Edit", () => does.edit(message))
      : button("Retry", () => does.retry(message));
    return element("span", { class: "tools" }, copy, other);
  }
}
