// What the model thought before it answered, folded.

import { element } from "./dom.js";
import { MarkdownView } from "./markdown_view.js";

export class ReasoningView {
  #text = "";

  constructor() {
    this.title = element("summary");
    const content = element("div", { class: "content" });
    this.markdown = new MarkdownView(content);
    this.node = element(
      "details", { class: "reasoning", hidden: true, ontoggle: () => this.#draw() }, this.title, content,
    );
  }

  update({ reasoning, content, calls, stats, finish, error }) {
    if (!reasoning) return;
    this.node.hidden = false;
    this.#text = reasoning;
    const isDone = content || calls || finish || error;
    const seconds = stats?.reasoned === undefined ? "" : ` ${stats.reasoned.toFixed(1)} s`;
    this.title.textContent = isDone ? `Reasoned${seconds && ` for${seconds}`}` : `Reasoning …${seconds}`;
    this.#draw();
  }

  /** While it is folded nothing is drawn. */
  #draw() {
    if (this.node.open) this.markdown.update(this.#text);
  }
}
