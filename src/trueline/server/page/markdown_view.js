// Markdown as elements. Text only ever becomes text nodes, and addresses only those of the web.

import { copyText } from "./clipboard.js";
import { button, element } from "./dom.js";
import { parseInline } from "./inline.js";
import { parseBlocks } from "./markdown.js";

/** A text that grows, shown in a node. Of blocks that are complete nothing is touched again. */
export class MarkdownView {
  #shown = "";
  #settled = 0;
  /** The elements of the last block, and what came after it. */
  #open = [];
  #codeView = null;

  constructor(node) {
    this.node = node;
  }

  update(text) {
    if (text === this.#shown) return;
    if (!text.startsWith(this.#shown)) {
      this.node.replaceChildren();
      [this.#settled, this.#open, this.#codeView] = [0, [], null];
    }
    this.#shown = text;
    const rest = text.slice(this.#settled);
    this.#draw(parseBlocks(rest));
    this.#settle(rest);
  }

  #draw(blocks) {
    if (blocks.length === 1 && blocks[0].type === "code" && this.#codeView) {
      this.#codeView.update(blocks[0]); // whoever selects in it, or scrolls, is not disturbed
      return;
    }
    this.#open.forEach((each) => each.remove());
    const views = blocks.map((block) => (block.type === "code" ? new CodeView(block) : block));
    this.#open = views.map((view) => view.node ?? renderBlock(view));
    this.#codeView = views.length === 1 && views[0].node ? views[0] : null;
    this.#open.forEach((each) => this.node.append(each));
  }

  /** The last block of whole lines may grow, and what is before it cannot change. */
  #settle(rest) {
    const lines = rest.slice(0, rest.lastIndexOf("\n") + 1);
    const complete = parseBlocks(lines);
    if (complete.length < 2) return;
    this.#settled += complete.at(-1).start;
    this.#open = this.#open.slice(complete.length - 1);
    this.#codeView = null;
  }
}

class CodeView {
  constructor({ language, text }) {
    this.text = document.createTextNode(text);
    this.language = element("span", {}, language);
    this.node = element(
      "figure",
      { class: "code" },
      element("figcaption", {}, this.language, button("Copy", () => copyText(this.text.data))),
      element("pre", { tabindex: 0 }, element("code", {}, this.text)),
    );
  }

  update({ language, text }) {
    if (text.startsWith(this.text.data)) this.text.appendData(text.slice(this.text.length));
    else this.text.data = text;
    this.language.textContent = language;
  }
}

function renderBlock(block) {
  switch (block.type) {
    // a page's own headings are above those of a message
    case "heading":
      return element(`h${Math.min(block.level + 2, 6)}`, { class: `h${block.level}` }, inline(block.text));
    case "rule": return element("hr");
    case "code": return new CodeView(block).node;
    case "quote": return element("blockquote", {}, block.blocks.map(renderBlock));
    case "list": return renderList(block);
    case "table": return renderTable(block);
    default: return element("p", {}, inline(block.text));
  }
}

function renderList({ first, items }) {
  const children = items.map((blocks) => element("li", {}, blocks.map(renderBlock)));
  return first === null ? element("ul", {}, children) : element("ol", { start: first }, children);
}

function renderTable({ aligned, head, rows }) {
  const row = (tag, texts) => element("tr", {}, texts.map((text, column) =>
    element(tag, { class: aligned[column] }, inline(text))));
  return element(
    "div",
    { class: "table", tabindex: 0, role: "region", "aria-label": "Table" },
    element("table", {},
      element("thead", {}, row("th", head)),
      element("tbody", {}, rows.map((texts) => row("td", texts)))),
  );
}

const inline = (text) => parseInline(text).map(renderPart);

function renderPart(part) {
  if (typeof part === "string") return part;
  const [kind, given, parts] = part;
  switch (kind) {
    case "break": return element("br");
    case "code": return element("code", {}, given);
    case "math": return element("span", { class: "math" }, given);
    case "link":
      return element(
        "a",
        { href: given, title: given, target: "_blank", rel: "noopener noreferrer nofollow" },
        parts.map(renderPart),
      );
    default: return element(kind, {}, given.map(renderPart));
  }
}
