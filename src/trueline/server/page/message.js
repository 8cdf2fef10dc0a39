// How messages are shown.

import { statsLine } from "./answer.js";
import { CallView, ResultsForm } from "./calls.js";
import { button, element } from "./dom.js";
import { MarkdownView } from "./markdown_view.js";
import { ReasoningView } from "./reasoning.js";
import { TokensView } from "./tokens.js";

const TITLES = { user: "You", assistant: "Model", tool: "Result" };

/** A message in the list. `does`: what its buttons do, each called with the message. */
export class MessageView {
  #calls = [];
  #results = null;

  constructor(message, does) {
    this.message = message;
    this.does = does;
    this.content = element("div", { class: "content" });
    this.markdown = new MarkdownView(this.content);
    this.reasoning = message.role === "assistant" ? new ReasoningView() : null;
    this.calls = element("div", { class: "calls" });
    this.tokens = message.role === "assistant" ? new TokensView() : null;
    this.error = element("p", { class: "error", role: "alert", hidden: true });
    this.stats = element("span", { class: "stats" });
    this.node = element(
      "li",
      { class: `message ${message.role}` },
      element("h2", { class: message.role === "tool" ? "label" : "unseen" }, this.#title()),
      this.reasoning?.node,
      this.content,
      this.calls,
      this.tokens?.node,
      this.error,
      element("div", { class: "foot" }, this.stats, this.#buttons()),
    );
    this.update();
  }

  /** Shows what is new of the message. */
  update() {
    const { role, content, error, calls = [] } = this.message;
    if (role === "assistant") this.markdown.update(content);
    else if (this.content.textContent !== content) this.content.textContent = content;
    this.reasoning?.update(this.message);
    this.#calls.filter((view) => !calls.includes(view.call)).forEach((view) => this.#dropCall(view));
    calls.slice(this.#calls.length).forEach((call) => this.#addCall(call));
    this.#calls.forEach((view) => view.update(this.isBusy));
    this.tokens?.update(this.message.tokens ?? []);
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.stats.textContent = statsLine(this.message);
  }

  set busy(value) {
    this.isBusy = value;
    this.node.setAttribute("aria-busy", value);
    this.update();
  }

  /** Asks for what the tools found; only where nothing has been said since. */
  askForResults(isLast) {
    const asks = isLast && !this.isBusy && this.message.calls?.length > 0;
    if (!asks) {
      this.#results?.remove();
      this.#results = null;
    } else if (!this.#results) {
      this.#results = new ResultsForm(this.message, this.does.giveResults).node;
      this.calls.append(this.#results);
    }
  }

  /** The tokens in place of the text that they make, and back. */
  #showTokens(event) {
    if (!this.message.tokens) {
      this.does.recordTokens();
      return;
    }
    this.tokens.open = !this.tokens.open;
    this.node.classList.toggle("as-tokens", this.tokens.open);
    event.target.setAttribute("aria-pressed", this.tokens.open);
  }

  #addCall(call) {
    const view = new CallView(call);
    this.#calls.push(view);
    this.calls.append(view.node);
  }

  /** One that is none after all. */
  #dropCall(view) {
    view.node.remove();
    this.#calls = this.#calls.filter((each) => each !== view);
  }

  #title() {
    const { role, name } = this.message;
    return name ? `${TITLES[role]} of ${name}` : TITLES[role];
  }

  #buttons() {
    const { message, does } = this;
    const copy = button("Copy", () => does.copy(message));
    const other = {
      user: () => button("Edit", () => does.edit(message)),
      assistant: () => button("Retry", () => does.retry(message)),
    }[message.role];
    const tokens = message.role === "assistant" ? button("Tokens", (event) => this.#showTokens(event), {
      "aria-pressed": "false", title: "How sure the model was of each token",
    }) : null;
    return element("span", { class: "tools" }, copy, other?.(), tokens);
  }
}
