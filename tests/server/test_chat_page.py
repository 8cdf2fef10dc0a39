"""The files of the chat page at /: who gets them, and with what policy."""

from __future__ import annotations

import asyncio
import logging
import re
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from trueline.server.app import build_app
from trueline.server.chat_page import page_routes
from trueline.server.config import ServerConfig
from trueline.server.keys import Keys

PATHS = [route.path for route in page_routes()]


def get(path: str, headers: dict[str, str] | None = None, **config: Any) -> httpx2.Response:
    service: Any = SimpleNamespace(
        config=ServerConfig(**config), metrics=SimpleNamespace(answered=lambda *given: None)
    )
    app: Any = build_app(service, Keys(["k"]), logging.getLogger("test"))

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(path, headers=headers or {})

    return asyncio.run(ask())


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found += [given[name] or "" for name in ("src", "href") if name in given]
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        self.inline += [tag] * (tag == "style" or (tag == "script" and "src" not in given))


def test_the_page_needs_no_key_and_all_work_does() -> None:
    for path in PATHS:
        assert get(path).status_code == 200, path
    assert get("/v1/models").status_code == 401


@pytest.mark.parametrize("path", PATHS)
def test_every_file_has_its_type_and_the_policy(path: str) -> None:
    answer = get(path)
    kind = {"/": "html", "css": "css", "js": "javascript", "svg": "svg+xml"}
    assert kind[path.rpartition(".")[2]] in answer.headers["content-type"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        part.partition(" ")[::2] for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert {policy.pop(f"{kind}-src") for kind in ("script", "style", "img", "connect")} == {
        "'self'"
    }
    assert set(policy.values()) == {"'none'"}
    assert {"default-src", "base-uri", "frame-ancestors", "trusted-types"} <= set(policy)


@pytest.mark.parametrize("path", PATHS)
def test_a_file_is_sent_again_only_when_it_has_changed(path: str) -> None:
    answer = get(path)
    again = get(path, {"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert get(path, {"if-none-match": '"other"'}).content == answer.content
    assert len({get(path).headers["etag"] for path in PATHS}) == len(PATHS)


def test_everything_that_files_name_is_there() -> None:
    index = Links(get("/").text)
    assert index.found
    assert index.inline == [], "the policy would not let it run"
    for name in index.found:
        assert f"/{name}" in PATHS
    for path in PATHS:
        if path.endswith(".js"):
            for name in re.findall(r'from "\./([^"]+)"', get(path).text):
                assert f"/page/{name}" in PATHS, f"{path} imports {name}"


def test_no_page_where_none_is_wanted() -> None:
    key = {"authorization": "Bearer k"}
    for path in PATHS:
        assert get(path, page=False).status_code == 401
        assert get(path, key, page=False).status_code == 404


def test_nothing_else_of_the_package_is_served() -> None:
    key = {"authorization": "Bearer k"}
    for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/app.js"):
        assert get(path, key).status_code == 404, path
