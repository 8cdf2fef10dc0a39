// Markdown's blocks: headings, lists, tables, quotes, fenced code, paragraphs. What a model writes is
// also what somebody had it write, so every input costs time in proportion to its length: a line is
// looked at once at each depth, and there are few depths.

const DEEPEST = 6;
const FENCE = /^(`{3,}|~{3,})(.*)$/;
const HEADING = /^(#{1,6})(?:[ \t](.*))?$/;
const ITEM = /^(?:([-*+])|(\d{1,9})[.)])(?:[ \t]|$)/;

/**
 * The blocks of a text, each with the place where it `start`s:
 *   {type: "paragraph", text} · {type: "heading", level, text} · {type: "rule"}
 *   {type: "code", language, text, closed} · {type: "quote", blocks}
 *   {type: "list", first (null: bullets), items: [blocks]} · {type: "table", aligned, head, rows}
 * Texts are inline Markdown, but for that of code.
 */
export function parseBlocks(text, depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  let start = 0;
  for (let at = 0; at < lines.length;) {
    const [block, next] = readBlock(lines, at, depth);
    if (block) blocks.push({ ...block, start });
    for (; at < Math.min(next, lines.length); at++) start += lines[at].length + 1;
  }
  return blocks;
}

/** A block that begins in a line (null: an empty line), and the line after it. */
function readBlock(lines, at, depth) {
  const line = bare(lines[at]);
  if (line === "") return [null, at + 1];
  const heading = HEADING.exec(line);
  if (heading) {
    const text = withoutClosing(heading[2] ?? "");
    return [{ type: "heading", level: heading[1].length, text }, at + 1];
  }
  if (isRule(line)) return [{ type: "rule" }, at + 1];
  if (fenceOf(line)) return readCode(lines, at);
  if (depth < DEEPEST && line[0] === ">") return readQuote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return readList(lines, at, depth);
  if (isTable(lines, at)) return readTable(lines, at);
  return readParagraph(lines, at, depth);
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !endsParagraph(lines, end, depth)) end++;
  return [{ type: "paragraph", text: lines.slice(at, end).map(bare).join("\n") }, end];
}

function endsParagraph(lines, at, depth) {
  const line = bare(lines[at]);
  const item = depth < DEEPEST && ITEM.exec(line);
  return beginsOther(line, depth) || isTable(lines, at)
    || (item && line.length > item[0].length && (item[1] || item[2] === "1"));
}

/** An empty line, or one with which something begins that is no paragraph, list or table. */
function beginsOther(line, depth) {
  return line === "" || HEADING.test(line) || isRule(line) || fenceOf(line) !== null
    || (depth < DEEPEST && line[0] === ">");
}

function readCode(lines, at) {
  const indent = indentOf(lines[at]);
  const [mark, info] = fenceOf(bare(lines[at]));
  const found = [];
  let end = at + 1;
  for (; end < lines.length; end++) {
    const line = bare(lines[end]);
    if (line.length >= mark.length && isAll(line, mark[0])) break;
    const own = lines[end].replace(/\r$/, "");
    found.push(own.slice(Math.min(indent, indentOf(own))));
  }
  const language = info.trim().split(/\s/, 1)[0];
  return [{ type: "code", language, text: found.join("\n"), closed: end < lines.length }, end + 1];
}

function readQuote(lines, at, depth) {
  const found = [];
  let end = at;
  for (; end < lines.length; end++) {
    const line = bare(lines[end]);
    if (line[0] !== ">") break;
    found.push(line.slice(line[1] === " " ? 2 : 1));
  }
  return [{ type: "quote", blocks: parseBlocks(found.join("\n"), depth + 1) }, end];
}

/** Two spaces are enough to be inside of an item: models are not exact about it. */
function readList(lines, at, depth) {
  const base = indentOf(lines[at]);
  const first = ITEM.exec(bare(lines[at]));
  const items = [];
  let width = 0;
  let end = at;
  for (; end < lines.length; end++) {
    const line = bare(lines[end]);
    const indent = indentOf(lines[end]);
    const isInside = items.length > 0 && (line === "" || indent >= base + 2);
    const item = isInside || isRule(line) ? null : ITEM.exec(line);
    if (isInside) {
      if (line !== "") width = Math.min(width, indent);
      items.at(-1).push(lines[end].slice(Math.min(indent, width)));
    } else if (item && !item[1] === !first[1]) {
      width = indent + item[0].length;
      items.push([line.slice(item[0].length)]);
    } else if (bare(lines[end - 1]) === "" || item || beginsOther(line, depth)) {
      break;
    } else {
      items.at(-1).push(line);
    }
  }
  const blocks = items.map((item) => parseBlocks(item.join("\n"), depth + 1));
  return [{ type: "list", first: first[1] ? null : Number(first[2]), items: blocks }, end];
}

function isTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !lines[at + 1].includes("-")) return false;
  const marks = cells(lines[at + 1]);
  return marks.every(isAlignment) && marks.length === cells(lines[at]).length;
}

/** ":---", "---:", ":---:" or "---". */
function isAlignment(cell) {
  return isAll(cell.slice(cell[0] === ":" ? 1 : 0, cell.at(-1) === ":" ? -1 : undefined), "-");
}

function readTable(lines, at) {
  const aligned = cells(lines[at + 1]).map((mark) =>
    mark.at(-1) !== ":" ? "start" : mark[0] === ":" ? "center" : "end");
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) {
    rows.push(cells(lines[end]).slice(0, aligned.length));
  }
  return [{ type: "table", aligned, head: cells(lines[at]), rows }, end];
}

/** Of a table's row; a pipe after a backslash belongs to its cell. */
function cells(line) {
  const row = bare(line);
  const found = [""];
  for (const part of row.slice(row[0] === "|" ? 1 : 0).split("|")) {
    const before = found.at(-1);
    if (before.endsWith("\\")) found[found.length - 1] = `${before.slice(0, -1)}|${part}`;
    else found.push(part);
  }
  found.shift();
  if (found.length > 1 && found.at(-1).trim() === "") found.pop();
  return found.map((cell) => cell.trim());
}

// -- lines -----------------------------------------------------------------------------

const bare = (line) => line.trim();

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function fenceOf(line) {
  const found = FENCE.exec(line);
  const isInline = found?.[1][0] === "`" && found[2].includes("`");
  return found && !isInline ? [found[1], found[2]] : null;
}

/** Three or more of one mark, with or without spaces. */
function isRule(line) {
  if (!"-*_".includes(line[0])) return false;
  const marks = line.replaceAll(" ", "");
  return marks.length > 2 && isAll(marks, line[0]);
}

function isAll(text, char) {
  for (let i = 0; i < text.length; i++) if (text[i] !== char) return false;
  return text.length > 0;
}

function withoutClosing(text) {
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text.trim();
}
