// How sure the model was: the tokens of an answer, and what might have stood in the place of each.

import { element } from "./dom.js";

/** Candidates that a request asks for. */
export const CANDIDATES = 5;
/** Least probabilities of the colours 0 to 3; what is below has colour 4. */
const LEVELS = [0.9, 0.6, 0.3, 0.1];
const LEGEND = ["90 % or more", "60 %", "30 %", "10 %", "less"];

/**
 * A stream's logprobs, as little of them as is shown, for it is kept: of each token {text, logprob, rank,
 * at, top}, where `top` has pairs of text and logprob, and `at` says which of them was drawn (-1: none).
 */
export function tokensOf(logprobs) {
  return (logprobs?.content ?? []).map(({ token, logprob, rank, bytes, top_logprobs = [] }) => ({
    text: token,
    logprob,
    rank,
    at: top_logprobs.findIndex((each) => each.token === token && `${each.bytes}` === `${bytes}`),
    top: top_logprobs.map((each) => [each.token, each.logprob]),
  }));
}

/** What is shown of one token: candidates in their order, the drawn one, and the rest of all. */
export function candidates({ text, logprob, rank, at, top }) {
  const rows = top.map(([name, value], i) => (
    { name: visible(name), share: Math.exp(value), drawn: i === at, rank: i + 1 }));
  if (at < 0) rows.push({ name: visible(text), share: Math.exp(logprob), drawn: true, rank });
  const rest = 1 - rows.reduce((sum, { share }) => sum + share, 0);
  if (rest > 0.0005) rows.push({ name: "all others", share: rest, drawn: false, rank: null });
  return rows;
}

export function percent(share) {
  return share > 0 && share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(share < 0.9995 ? 1 : 0)} %`;
}

/** 0: sure, to 4. */
export function level(logprob) {
  const found = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
  return found < 0 ? LEVELS.length : found;
}

/** Blanks and what has no shape, so that every token is seen. */
export function visible(text) {
  const shown = text.replace(/[\x00-\x20\x7f\xa0\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (one) => (
    NAMES[one] ?? `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`));
  return shown || "∅";
}

const NAMES = { " ": "␣", "\n": "↵", "\t": "⇥" };

/** The tokens of one answer; of the one that is chosen the candidates. */
export class TokensView {
  #shown = 0;
  #chosen = -1;

  constructor() {
    this.list = element("div", {
      class: "list",
      role: "group",
      "aria-label": "Tokens. Arrow keys go from one to the next.",
      onclick: (event) => this.#choose([...this.list.children].indexOf(event.target)),
      onkeydown: (event) => this.#go(event),
    });
    this.panel = element("div", { class: "candidates", role: "status", hidden: true });
    this.node = element("div", { class: "tokens", hidden: true }, legend(), this.list, this.panel);
    this.tokens = [];
  }

  get open() {
    return !this.node.hidden;
  }

  set open(value) {
    this.node.hidden = !value;
    this.#draw();
  }

  update(tokens) {
    this.tokens = tokens;
    this.#draw();
  }

  /** While it is closed nothing is drawn; of what is drawn nothing changes. */
  #draw() {
    if (!this.open) return;
    const fresh = this.tokens.slice(this.#shown).map((token, i) => tokenNode(token, this.#shown + i));
    this.#shown = this.tokens.length;
    this.list.append(...fresh);
  }

  #choose(index) {
    if (index < 0) return;
    const before = this.list.children[Math.max(this.#chosen, 0)];
    before.tabIndex = -1;
    before.setAttribute("aria-pressed", false);
    this.#chosen = index;
    const node = this.list.children[index];
    node.tabIndex = 0;
    node.setAttribute("aria-pressed", true);
    node.focus({ preventScroll: true });
    this.panel.hidden = false;
    this.panel.replaceChildren(...bars(this.tokens[index]));
    // all of it, where there is room; else the candidates are at the bottom, and the token above them
    if (this.node.offsetHeight < innerHeight / 2) this.node.scrollIntoView({ block: "nearest" });
    node.style.scrollMarginBlockEnd = `${this.panel.offsetHeight + 24}px`;
    node.scrollIntoView({ block: "nearest" });
  }

  #go(event) {
    const last = this.list.children.length - 1;
    const here = [...this.list.children].indexOf(event.target);
    const to = {
      ArrowLeft: Math.max(here - 1, 0), ArrowRight: Math.min(here + 1, last), Home: 0, End: last,
      Enter: here, " ": here,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#choose(to);
  }
}

function tokenNode({ text, logprob }, index) {
  const share = percent(Math.exp(logprob));
  return element(
    "span",
    {
      class: "token",
      role: "button",
      tabindex: index === 0 ? 0 : -1,
      "aria-pressed": "false",
      "aria-label": `${visible(text)}, ${share}`,
      title: share,
      "data-level": level(logprob),
    },
    // a line end is seen, and ends the line
    text.trim() ? text : visible(text) + (text.includes("\n") ? "\n" : ""),
  );
}

function bars(token) {
  const others = token.rank > token.top.length ? ` (of all tokens number ${token.rank.toLocaleString("en")})` : "";
  return [
    element("p", {}, "drawn: ", element("b", {}, visible(token.text)), ` ${percent(Math.exp(token.logprob))}${others}`),
    element("ol", {}, candidates(token).map(({ name, share, drawn, rank }) => {
      const bar = element("span", { class: "fill" });
      bar.style.inlineSize = `${100 * share}%`;
      return element(
        "li",
        { class: drawn ? "drawn" : rank === null ? "rest" : null },
        element("span", { class: "rank" }, rank === null ? "" : String(rank)),
        element("span", { class: "name" }, name, drawn ? element("span", { class: "unseen" }, " (drawn)") : null),
        element("span", { class: "bar", "aria-hidden": "true" }, bar),
        element("span", { class: "share" }, percent(share)),
      );
    })),
  ];
}

function legend() {
  return element("p", { class: "legend" }, "How likely each token was: ", LEGEND.map((text, i) =>
    element("span", { class: "token", "data-level": i }, text)));
}
