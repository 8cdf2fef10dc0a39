"""/docs: every route and field of the OpenAPI document, without script or another request."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from trueline.server.docs_page import POLICY, docs_page
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.openapi import openapi

LIMITS = RequestLimits(models=("<script>alert(1)</script>",), max_model_len=64, vocab_size=300)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def test_everything_of_the_document_is_on_the_page() -> None:
    document = openapi(LIMITS)
    page = Page(docs_page(document))
    told = set(page.text.split())
    assert set(document["paths"]) <= told
    for name in ("CompletionBody", "ChatBody"):
        assert set(document["components"]["schemas"][name]["properties"]) <= told
    assert page.text.count("needs an API key") == sum(
        "security" in operation
        for methods in document["paths"].values()
        for operation in methods.values()
    )
    assert "needs an API key" not in docs_page(openapi(LIMITS, with_keys=False))


def test_it_runs_and_fetches_nothing() -> None:
    document = openapi(LIMITS)
    document["info"]["title"] = '"><script>x</script>'
    text = docs_page(document)
    names = {tag for tag, _ in Page(text).tags}
    assert not names & {"script", "link", "img", "iframe"}
    assert not re.search(r"(src|href)=\S*//", text)
    assert "default-src 'none'" in POLICY
