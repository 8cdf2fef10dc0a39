// Markdown inside a paragraph: code, emphasis, links, mathematics as it is written. Each input costs
// time in proportion to its length: what has been searched for in vain is not searched for again.

const DEEPEST = 8;
const SPECIAL = /[\\`*_~[\]!\n]|\$\$|https?:\/\//g;
// scripts without spaces between words count as punctuation: emphasis begins and ends anywhere there
const PUNCTUATION =
  /[\p{P}\p{S}\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const TAGS = { "*1": "em", "*2": "strong", _1: "em", _2: "strong", "~2": "del" };

/**
 * Texts, and what is more than text: ["code", text] · ["math", text] · ["break"] ·
 * ["em" | "strong" | "del", parts] · ["link", address, parts]. An address begins with http:// or
 * https://: a link to anything else stays text.
 */
export function parseInline(text) {
  return build(new Scanner(text).tokens());
}

class Scanner {
  #tokens = [];
  /** Places in #tokens of brackets that may open a link. */
  #brackets = [];
  #ends = new Map();

  constructor(text) {
    this.text = text;
  }

  /** Texts, parts, and runs of delimiters: {mark, count, opens, closes}. */
  tokens() {
    const { text } = this;
    let at = 0;
    while (at < text.length) {
      SPECIAL.lastIndex = at;
      const found = SPECIAL.exec(text);
      const next = found ? found.index : text.length;
      if (next > at) this.#tokens.push(text.slice(at, next));
      at = found ? this.#special(found[0], next) : next;
    }
    return this.#tokens;
  }

  /** Reads what begins with a special text; returns where it ends. */
  #special(mark, at) {
    const { text } = this;
    switch (mark) {
      case "\\": return this.#escape(at);
      case "`": return this.#code(at);
      case "$$": return this.#math(at, "$$");
      case "*": case "_": case "~": return this.#run(mark, at);
      case "[": return this.#open(at, at + 1);
      case "!": return text[at + 1] === "[" ? this.#open(at, at + 2) : this.#text(at, at + 1);
      case "]": return this.#close(at);
      case "\n": return this.#part(["break"], at + 1);
      default: return this.#bareLink(at);
    }
  }

  #part(part, end) {
    this.#tokens.push(part);
    return end;
  }

  #text(at, end) {
    return this.#part(this.text.slice(at, end), end);
  }

  #escape(at) {
    const next = this.text[at + 1] ?? "";
    if (next === "(") return this.#math(at, "\\)");
    if (next === "[") return this.#math(at, "\\]");
    if (next === "\n") return this.#part(["break"], at + 2);
    if (ESCAPABLE.test(next)) return this.#part(next, at + 2);
    return this.#text(at, at + 1);
  }

  #math(at, closing) {
    const end = this.#find(closing, at + 2);
    if (end < 0) return this.#text(at, at + 2);
    return this.#part(["math", this.text.slice(at, end + 2)], end + 2);
  }

  /** Where a text is next; what is not there is searched for once. */
  #find(wanted, from) {
    if (this.#ends.get(wanted) === -1) return -1;
    const found = this.text.indexOf(wanted, from);
    this.#ends.set(wanted, found);
    return found;
  }

  #code(at) {
    const { text } = this;
    const end = runEnd(text, at);
    const length = end - at;
    this.runs ??= backticks(text);
    const places = this.runs.get(length) ?? [];
    while (places.at(-1) <= at) places.pop(); // they are in falling order
    if (!places.length) return this.#text(at, end);
    const close = places.at(-1);
    const inside = text.slice(end, close).replaceAll("\n", " ");
    const isPadded = inside.length > 2 && inside[0] === " " && inside.at(-1) === " ";
    return this.#part(["code", isPadded ? inside.slice(1, -1) : inside], close + length);
  }

  #run(mark, at) {
    const { text } = this;
    const end = runEnd(text, at);
    const count = end - at;
    if (mark === "~" && count !== 2) return this.#text(at, end);
    const before = kindOf(characterBefore(text, at));
    const after = kindOf(String.fromCodePoint(text.codePointAt(end) ?? 32));
    const left = after !== "space" && (after === "word" || before !== "word");
    const right = before !== "space" && (before === "word" || after !== "word");
    const within = mark === "_"; // snake_case is no emphasis
    return this.#part({
      mark, count, length: count,
      opens: left && (!within || !right || before === "punctuation"),
      closes: right && (!within || !left || after === "punctuation"),
      closed: [], opened: [],
    }, end);
  }

  #open(at, end) {
    this.#brackets.push(this.#tokens.length);
    return this.#text(at, end);
  }

  #close(at) {
    const open = this.#brackets.pop();
    const target = open === undefined ? null : linkTarget(this.text, at + 1);
    const address = target && webAddress(target.address);
    if (!address) return this.#text(at, at + 1);
    const [bracket, ...inside] = this.#tokens.splice(open);
    const parts = build(inside.map((each) => (each[0] === "link" ? plain(each[2]) : each)));
    this.#brackets = []; // there are no links in links
    const shown = parts.length ? parts : [bracket === "![" ? "image" : address];
    return this.#part(["link", address, shown], target.end);
  }

  #bareLink(at) {
    const { text } = this;
    const address = /[^\s<>[\]`"*|\\]+/y;
    address.lastIndex = at;
    const found = withoutClosing(address.exec(text)[0]);
    const url = /\w/.test(text[at - 1] ?? "") ? null : webAddress(found);
    if (!url) return this.#text(at, at + found.length);
    return this.#part(["link", url, [found]], at + found.length);
  }
}

/** `(address "title")` at a place. */
function linkTarget(text, at) {
  if (text[at] !== "(") return null;
  let end = at + 1;
  for (let depth = 0; end < text.length && !/[\s<>[\]]/.test(text[end]); end++) {
    if (text[end] === "(") depth++;
    else if (text[end] === ")" && depth-- === 0) break;
  }
  const address = text.slice(at + 1, end);
  if (text[end] === " ") {
    while (text[end] === " ") end++;
    if (text[end] !== '"') return null;
    end++;
    while (end < text.length && text[end] !== '"' && text[end] !== "\n") end++;
    end++;
  }
  return text[end] === ")" ? { address, end: end + 1 } : null;
}

/** The address as a browser will read it, where that is one of the web; null otherwise. */
function webAddress(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    const { protocol, href } = new URL(text);
    return protocol === "https:" || protocol === "http:" ? href : null;
  } catch {
    return null;
  }
}

/** An address without the marks that end its sentence, or the bracket that it stands in. */
function withoutClosing(address) {
  let open = 0;
  for (const char of address) open += char === "(" ? 1 : char === ")" ? -1 : 0;
  let end = address.length;
  for (; end > 0; end--) {
    const last = address[end - 1];
    if (last === ")" && open < 0) open++;
    else if (!".,:;!?'_~".includes(last)) break;
  }
  return address.slice(0, end);
}

/** The places of runs of backticks by their length, the last first. */
function backticks(text) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!runs.has(run.length)) runs.set(run.length, []);
    runs.get(run.length).push(index);
  }
  for (const places of runs.values()) places.reverse();
  return runs;
}

function runEnd(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return end;
}

function characterBefore(text, at) {
  const low = text.charCodeAt(at - 1);
  const isPair = low >= 0xdc00 && low <= 0xdfff;
  return at === 0 ? " " : text.slice(at - (isPair ? 2 : 1), at);
}

function kindOf(char) {
  return /\s/.test(char) ? "space" : PUNCTUATION.test(char) ? "punctuation" : "word";
}

function plain(parts) {
  return parts.map((part) => (typeof part === "string" ? part : plain(part.slice(-1).flat()))).join("");
}

// -- emphasis --------------------------------------------------------------------------

/** Parts of tokens, with their runs of delimiters matched by CommonMark's rules. */
function build(tokens) {
  match(tokens.filter((token) => token.mark));
  const root = [];
  const open = [root];
  const add = (text) => {
    const parts = open.at(-1);
    if (typeof parts.at(-1) === "string") parts[parts.length - 1] += text;
    else if (text) parts.push(text);
  };
  for (const token of tokens) {
    if (typeof token === "string") {
      add(token);
    } else if (token.mark) {
      token.closed.forEach(() => open.pop());
      add(token.mark.repeat(token.count));
      for (const tag of token.opened.reverse()) {
        const parts = open.length > DEEPEST ? open.at(-1) : [];
        if (parts !== open.at(-1)) open.at(-1).push([tag, parts]);
        open.push(parts);
      }
    } else {
      open.at(-1).push(token);
    }
  }
  return root;
}

/** Notes in runs which tags they close and open (the innermost first); `count` is what is left. */
function match(runs) {
  const openers = [];
  const searched = new Map(); // by kind of closer: how many openers do not match it
  for (const run of runs) {
    const kind = `${run.mark}${run.opens}${run.length % 3}`;
    while (run.closes && run.count > 0) {
      const least = searched.get(kind) ?? 0;
      let at = openers.length - 1;
      while (at >= least && !matches(openers[at], run)) at--;
      if (at < least) {
        searched.set(kind, openers.length);
        break;
      }
      const opener = openers[at];
      const used = opener.count > 1 && run.count > 1 ? 2 : 1;
      opener.count -= used;
      run.count -= used;
      opener.opened.push(TAGS[run.mark + used]);
      run.closed.push(TAGS[run.mark + used]);
      openers.length = opener.count > 0 ? at + 1 : at;
      for (const [each, count] of searched) searched.set(each, Math.min(count, at));
    }
    if (run.opens && run.count > 0) openers.push(run);
  }
}

function matches(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  const isBoth = opener.closes || closer.opens;
  const sum = opener.length + closer.length;
  return !isBoth || sum % 3 !== 0 || (opener.length % 3 === 0 && closer.length % 3 === 0);
}
