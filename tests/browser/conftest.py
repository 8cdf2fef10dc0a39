"""Tests in a real browser are slow, and skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chromium import find_chromium, missing
from page_stub import PageStub
from stub_server import stub_server
from visits import Visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Visiting = Callable[..., Visit]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("slow")
            item.add_marker("browser")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Of one module: until it is closed Playwright's loop runs in the thread of all tests."""
    if reason := missing():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # there is none for root
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[PageStub]:
    with stub_server(PageStub) as server:
        yield server


@pytest.fixture
def visit(chromium: Browser, stub: PageStub) -> Iterator[Visiting]:
    """visit(url, …) -> a Visit, without faults at the end of the test. It ends before the stub: a
    page asks its server again and again."""
    visits: list[Visit] = []

    def begin(*given: object, **options: object) -> Visit:
        visits.append(Visit(chromium, *given, **options))
        return visits[-1]

    yield begin
    assert [fault for each in visits for fault in each.close()] == []
