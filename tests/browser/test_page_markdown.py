"""What a model writes, as elements: never more than Markdown's own, the same however it came."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from page_cases import BLOCKS, INLINE
from page_stub import PageStub
from visits import Visit

Visiting = Callable[..., Visit]
PAYLOADS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg/onload=window.hit=1><style>*{display:none}</style>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "[click](javascript:window.hit=1) [b]( javascript:window.hit=1) <javascript:window.hit=1>",
    "[click](https://x.y/\"onmouseover=\"window.hit=1) [b](https://x.y/'onclick='window.hit=1)",
    "![x](https://x.y/track.png) ![y](/metrics) ![z](data:image/svg+xml,<svg/onload=window.hit=1>)",
    '```"><script>window.hit=1</script>\n</code></pre><script>window.hit=1</script>\n```',
    "```js onload=window.hit=1 class='\nx\n```",
    "| <b onclick=window.hit=1>a</b> | b |\n|---|---|\n| <script>window.hit=1</script> | `<i>` |",
    "# <a name=settings-form>x</a>\n<form id=settings-form action=https://x.y><button>Send</button>",
    "- <details open ontoggle=window.hit=1>\n> <input autofocus onfocus=window.hit=1>",
    "<meta http-equiv=refresh content='0;url=https://x.y'><base href=https://x.y>",
    "[a](https://x.y/%0d%0aSet-Cookie:x) [b](https://user:pass@x.y/) [c](https://х.y)",
    "{{constructor.constructor('window.hit=1')()}} ${window.hit=1}",
    "\u202egnp.exe\u202c \u0000 \ufeff",
]
TAGS = set(
    "p h3 h4 h5 h6 hr blockquote ul ol li div table thead tbody tr th td figure figcaption span "
    "button pre code em strong del a br".split()
)
ATTRIBUTES = {
    "class": None, "tabindex": {"0"}, "role": {"region"}, "aria-label": {"Table"}, "start": None,
    "type": {"button"}, "href": None, "title": None, "target": {"_blank"},
    "rel": {"noopener noreferrer nofollow"},
}  # fmt: skip
ELEMENTS = """
(content) => [...content.querySelectorAll("*")].map((each) => [
  each.localName, Object.fromEntries([...each.attributes].map(({name, value}) => [name, value])),
])
"""
PREFIXES = """
async (texts) => {
  const { MarkdownView } = await import("/page/markdown_view.js");
  const html = (node) => node.innerHTML;
  for (const text of texts) {
    const grown = document.createElement("div");
    const view = new MarkdownView(grown);
    for (let end = 1; end <= text.length; end++) {
      const prefix = text.slice(0, end);
      view.update(prefix);
      const whole = document.createElement("div");
      new MarkdownView(whole).update(prefix);
      if (html(grown) !== html(whole)) return [prefix, html(grown), html(whole)];
    }
  }
  return null;
}
"""
DRAWN = """
(seed, count) => {
  const parts = ["a", " ", "\\n", "\\n\\n", "- ", "1. ", "> ", "```", "```py\\n",
    "| a | b |\\n", "|--|--|", "  ", "# ", "---", "*", "**", "`", "_", "[x](https://y.z)", "|",
    "    ", "~~~", "\\r\\n"];
  const texts = [];
  for (let i = 0; i < count; i++) {
    let text = "";
    for (let j = 0; j < 24; j++) {
      seed = (Math.imul(seed, 1103515245) + 12345) >>> 0;
      text += parts[(seed >>> 16) % parts.length];
    }
    texts.push(text);
  }
  return texts;
}
"""


@pytest.fixture
def here(visit: Visiting, stub: PageStub) -> Visit:
    found = visit(stub.url)
    found.wait_until_ready()
    return found


@pytest.mark.parametrize("payload", PAYLOADS)
def test_hostile_markdown_is_only_text(here: Visit, stub: PageStub, payload: str) -> None:
    stub.say(*payload)
    here.send("go")
    content = here.find(".assistant > .content")
    found = content.evaluate(ELEMENTS)
    for tag, attributes in found:
        assert tag in TAGS
        for name, value in attributes.items():
            accepted = ATTRIBUTES[name]
            assert accepted is None or value in accepted, (tag, name, value)
            if name == "href":
                assert value.startswith(("https://", "http://"))
    for link in content.locator("a").all():
        link.hover()
    assert here.page.evaluate("window.hit") is None
    assert here.page.url == here.url
    here.page.reload()  # and from what is stored
    assert content.evaluate(ELEMENTS) == found


@pytest.mark.parametrize("seed", range(4))
def test_it_looks_the_same_however_it_came(here: Visit, seed: int) -> None:
    texts = [text for text, _ in BLOCKS if len(text) < 200] if seed == 0 else []
    texts += here.page.evaluate(f"() => ({DRAWN})({seed + 1}, 60)")
    assert here.page.evaluate(PREFIXES, texts) is None


def test_modules_do_as_by_node(here: Visit) -> None:
    for module, name, cases in (
        ("inline", "parseInline", INLINE),
        ("markdown", "parseBlocks", BLOCKS),
    ):
        texts = [text for text, _ in cases]
        one = f"(texts) => import('/page/{module}.js').then((m) => texts.map((t) => m.{name}(t)))"
        assert here.page.evaluate(one, texts) == [wanted for _, wanted in cases]


def test_a_long_answer_is_shown_as_it_comes(here: Visit, stub: PageStub) -> None:
    """Of blocks that are complete the elements stay the same."""
    paragraphs = [f"paragraph {i}\n\n" for i in range(50)]
    stub.answers = [[{"content": text} for text in paragraphs] + [{}, {"content": "end"}]]
    here.find("#prompt").fill("go")
    here.button("Send").click()
    here.find(".assistant > .content p").filter(has_text="paragraph 49").wait_for()
    here.page.evaluate("document.querySelector('.assistant > .content p').id = 'kept'")
    stub.holding = False
    here.wait_until_idle()
    assert here.find("#kept").inner_text() == "paragraph 0"
    assert len(here.find(".assistant > .content p").all()) == 51


def test_code_is_copied(visit: Visiting, stub: PageStub) -> None:
    stub.say("```py\nprint('<b>')\n```\n", "and\n\n1. `more`\n")
    here = visit(stub.url, permissions=["clipboard-read", "clipboard-write"])
    here.wait_until_ready()
    here.send("go")
    here.find(".code").get_by_role("button", name="Copy").click()
    here.find("#notice").filter(has_text="Copied").wait_for()
    assert here.page.evaluate("navigator.clipboard.readText()") == "print('<b>')"
    here.button("Copy").click()
    assert here.page.evaluate("navigator.clipboard.readText()").endswith("1. `more`\n")
