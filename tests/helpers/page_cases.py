"""What the chat page's modules make of their inputs, for those who run JavaScript: node where there
is one, and the browser."""

from __future__ import annotations

from typing import Any

INLINE: list[tuple[str, list[Any]]] = [
    ("plain text", ["plain text"]),
    ("a *b* **c** __d__ _e_", ["a ", ["em", ["b"]], " ", ["strong", ["c"]], " ",
                               ["strong", ["d"]], " ", ["em", ["e"]]]),
    ("***a***", [["em", [["strong", ["a"]]]]]),
    ("*a **b** c*", [["em", ["a ", ["strong", ["b"]], " c"]]]),
    ("**a *b*** *c* d*", [["strong", ["a ", ["em", ["b"]]]], " ", ["em", ["c"]], " d*"]),
    ("*a _b* c_", [["em", ["a _b"]], " c_"]),
    ("snake_case_name 2 * 3 * 4", ["snake_case_name 2 * 3 * 4"]),
    ("un*frigging*believable", ["un", ["em", ["frigging"]], "believable"]),
    ("**open and *more", ["**open and *more"]),
    ("*a**b*", [["em", ["a**b"]]]),
    ("**中文。**后", [["strong", ["中文。"]], "后"]),
    ("~~gone~~ ~1 ~~~x~~~", [["del", ["gone"]], " ~1 ~~~x~~~"]),
    ("`a*b*` ``c`d`` ` e ` `open", [["code", "a*b*"], " ", ["code", "c`d"], " ", ["code", "e"],
                                    " `open"]),
    ("*a `b*` c*", [["em", ["a ", ["code", "b*"], " c"]]]),
    ("\\*a\\* \\` \\\\ \\x", ["*a* ` \\ \\x"]),
    ("\\`` a `b`", ["`", ["code", "a"], "b`"]),
    ("one\ntwo", ["one", ["break"], "two"]),
    ("\\(x_1 * y_1\\) \\[z\\] $$a*b*c$$", [["math", "\\(x_1 * y_1\\)"], " ", ["math", "\\[z\\]"],
                                            " ", ["math", "$$a*b*c$$"]]),
    ("\\(open $$ too", ["\\(open $$ too"]),
    ("[a *b*](https://x.y/z_(1)?q=a_b)",
     [["link", "https://x.y/z_(1)?q=a_b", ["a ", ["em", ["b"]]]]]),
    ('[a](http://x.y "title") [b](http://x.y "t) [c](http://x.y',
     [["link", "http://x.y/", ["a"]], " [b](", ["link", "http://x.y/", ["http://x.y"]], ' "t) [c](',
      ["link", "http://x.y/", ["http://x.y"]]]),
    ("![alt](https://x.y/i.png) ![](https://x.y/)",
     [["link", "https://x.y/i.png", ["alt"]], " ", ["link", "https://x.y/", ["image"]]]),
    ("[https://bank.example](https://evil.example)",
     [["link", "https://evil.example/", ["https://bank.example"]]]),
    ("see https://x.y/a_b_(c), (https://x.y/d). <https://x.y>",
     ["see ", ["link", "https://x.y/a_b_(c)", ["https://x.y/a_b_(c)"]], ", (",
      ["link", "https://x.y/d", ["https://x.y/d"]], "). <",
      ["link", "https://x.y/", ["https://x.y"]], ">"]),
    ("**https://x.y/a**", [["strong", [["link", "https://x.y/a", ["https://x.y/a"]]]]]),
    ("xhttps://x.y https:// http://[", ["xhttps://x.y https:// http://["]),
    *(
        (f"[a]({address})", [f"[a]({address})"])
        for address in ("javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x",
                        "/v1/models", "//x.y", "vbscript:x", "file:///etc/passwd", "blob:x", "",
                        "mailto:a@b.c",
                        "java&#115;cript:x", "&#106;avascript:x", "\x01javascript:x")
    ),
    ("[a](https:x) [b](https:/\\evil)", ["[a](https:x) [b](https:/\\evil)"]),
    ("<img src=x onerror=alert(1)> &lt;b&gt;", ["<img src=x onerror=alert(1)> &lt;b&gt;"]),
]  # fmt: skip


def _paragraph(text: str, start: int = 0) -> dict[str, Any]:
    return {"type": "paragraph", "text": text, "start": start}


def _list(first: int | None, *items: list[Any], start: int = 0) -> dict[str, Any]:
    return {"type": "list", "first": first, "items": list(items), "start": start}


def _code(language: str, text: str, closed: bool = True, start: int = 0) -> dict[str, Any]:
    return {"type": "code", "language": language, "text": text, "closed": closed, "start": start}


def _heading(level: int, text: str, start: int = 0) -> dict[str, Any]:
    return {"type": "heading", "level": level, "text": text, "start": start}


def _quotes(depth: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "quote", "blocks": [_quotes(depth - 1, block)], "start": 0} if depth else block


BLOCKS: list[tuple[str, list[Any]]] = [
    ("", []),
    ("\n \n", []),
    ("a\nb\n\nc", [_paragraph("a\nb"), _paragraph("c", 5)]),
    ("# a\n## b ##\n####### c\n#d\n#\n# ###", [
        _heading(1, "a"), _heading(2, "b", 4), _paragraph("####### c\n#d", 12), _heading(1, "", 25),
        _heading(1, "", 27),
    ]),
    ("# C# and F#", [_heading(1, "C# and F#")]),
    ("a\n***\n- - -\n__", [
        _paragraph("a"), {"type": "rule", "start": 2}, {"type": "rule", "start": 6},
        _paragraph("__", 12),
    ]),
    ("```py x\na\n\n  b\n```\nc", [_code("py", "a\n\n  b"), _paragraph("c", 19)]),
    ("~~~\n```\n~~~~", [_code("", "```")]),
    ("````\n```\n````", [_code("", "```")]),
    ("```\nopen\n", [_code("", "open\n", closed=False)]),
    ("```a```", [_paragraph("```a```")]),
    ("a\n```\nb", [_paragraph("a"), _code("", "b", closed=False, start=2)]),
    ("a\r\n```\r\nb\r\n```\r\n", [_paragraph("a"), _code("", "b", start=3)]),
    ("- a\n- b\n\n- c\nlazy\n\nd", [
        _list(None, [_paragraph("a")], [_paragraph("b")], [_paragraph("c\nlazy")]),
        _paragraph("d", 19),
    ]),
    ("1. a\n  - b\n    - c\n7) d", [
        _list(1, [
            _paragraph("a"),
            _list(None, [_paragraph("b"), _list(None, [_paragraph("c")], start=2)], start=2),
        ], [_paragraph("d")]),
    ]),
    ("3. a\n* b", [_list(3, [_paragraph("a")]), _list(None, [_paragraph("b")], start=5)]),
    ("1. a\n   ```\n     b\n   ```\n2. c", [
        _list(1, [_paragraph("a"), _code("", "  b", start=2)], [_paragraph("c")]),
    ]),
    ("a\n2024. b\n- c", [_paragraph("a\n2024. b"), _list(None, [_paragraph("c")], start=10)]),
    ("a\n-\nb", [_paragraph("a\n-\nb")]),
    ("- a\n---\n- b", [
        _list(None, [_paragraph("a")]), {"type": "rule", "start": 4},
        _list(None, [_paragraph("b")], start=8),
    ]),
    ("> a\n>> b\n> - c\nd", [
        {"type": "quote", "blocks": [
            _paragraph("a"), {"type": "quote", "blocks": [_paragraph("b")], "start": 2},
            _list(None, [_paragraph("c")], start=6),
        ], "start": 0},
        _paragraph("d", 15),
    ]),
    ("t\n| a | b |\n|:--|:-:|\n| 1 | x \\| y | more |\n| 2\nend", [
        _paragraph("t"),
        {"type": "table", "aligned": ["start", "center"], "head": ["a", "b"],
         "rows": [["1", "x | y"], ["2"]], "start": 2},
        _paragraph("end", 48),
    ]),
    ("a | b\n-|-:\n", [
        {"type": "table", "aligned": ["start", "end"], "head": ["a", "b"], "rows": [], "start": 0},
    ]),
    ("| a | b |\n|---|\n", [_paragraph("| a | b |\n|---|")]),
    (">" * 8 + " a", [_quotes(6, _paragraph(">> a"))]),
]  # fmt: skip

SIZE = 1_000_000
"""Characters. What costs their square takes minutes."""
HOSTILE = {
    name: f"{text}.repeat({SIZE} / {len_of})"
    for name, text, len_of in [
        ("stars", "'*'", 1), ("star and letter", "'*a'", 2), ("letter and star", "'a*'", 2),
        ("openers", "'*a _b '", 6), ("mixed runs", "'a**b*c '", 7), ("tildes", "'~~a '", 4),
        ("brackets", "'['", 1), ("links begun", "'[a](b'", 5), ("spaces", "'[](x          '", 14),
        ("titles", "'[](x \"'", 6), ("images", "'![](https://x.y) '", 17),
        ("backticks", "'`` ` '", 5), ("formulas", "'\\\\('", 2), ("dollars", "'$$ '", 3),
        ("addresses", "'http://'", 7), ("backslashes", "'\\\\'", 1),
        ("surrogates", "'\\ud800*'", 2),
        ("quotes", "'>'", 1), ("lists in one line", "'- '", 2), ("items", "'- a\\n'", 4),
        ("loose items", "'- a\\n\\n'", 5), ("hashes", "'# a #\\n'", 6), ("rows", "'|a\\n'", 3),
        ("pipes", "'|'", 1), ("fences", "'```\\n'", 4), ("rules", "'* * a\\n'", 6),
        ("line ends", "'\\r\\n'", 2), ("blanks", "' '", 1), ("quoted lists", "'> - '", 4),
    ]
} | {
    "closing brackets": f"'https://a' + ')'.repeat({SIZE})",
    "runs of every length": "Array.from({length: 1400}, (_, i) => '`'.repeat(i)).join(' ')",
    "ever deeper": "Array.from({length: 1400}, (_, i) => ' '.repeat(i) + '- a').join('\\n')",
    "wide table": f"'|'.repeat({SIZE} / 4) +'\\n' + '|-'.repeat({SIZE} / 4) + '\\n|a'.repeat(9999)",
    "one deep in another": f"'*a **b '.repeat({SIZE} / 14) + 'c** d* '.repeat({SIZE} / 14)",
    "padded heading": f"'# a' + ' #'.repeat({SIZE} / 2) + 'b'",
}  # fmt: skip
READ_ALL = """
(blocks, inline, text) => {
  let count = 0;
  const read = (found) => found.forEach((block) => {
    count += 1;
    if (block.text !== undefined && block.type !== "code") inline.parseInline(block.text);
    if (block.blocks) read(block.blocks);
    block.items?.forEach(read);
    block.rows?.forEach((row) => row.forEach(inline.parseInline));
  });
  read(blocks.parseBlocks(text));
  return count;
}
"""
