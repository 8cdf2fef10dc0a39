"""The page is closed to code and to other servers, and the tests would see a breach."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from page_stub import PageStub
from visits import Visit

Visiting = Callable[..., Visit]
BREACHES = {
    "html": "document.body.innerHTML = '<b>x</b>'",
    "handler": "document.body.setAttribute('onclick', 'x()'); document.body.click()",
    "script": "document.body.append(Object.assign(document.createElement('script'), {text: '1'}))",
    "timer": "setTimeout('1', 0)",
    "other server": "fetch('http://127.0.0.1:9/').catch(() => 0)",
    "image": "document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/i.png'}))",
    "form": "document.body.append(Object.assign(document.createElement('form'),"
    " {action: 'http://127.0.0.1:9/', id: 'f'})); document.getElementById('f').submit()",
}


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES)
def test_a_breach_is_stopped_and_seen(visit: Visiting, stub: PageStub, breach: str) -> None:
    from playwright.sync_api import Error

    here = visit(stub.url)
    here.wait_until_ready()
    assert here.faults == []
    with suppress(Error):
        here.page.evaluate(f"() => {{ {breach} }}")
    here.page.wait_for_function("() => true", polling=50)
    assert any("Content Security Policy" in f or "requires 'Trusted" in f for f in here.faults)
    assert here.page.url == here.url
    here.accepted.append("")


def test_the_page_keeps_all_that_it_names_in_its_folder(visit: Visiting, stub: PageStub) -> None:
    here = visit(stub.url)
    here.wait_until_ready()
    loaded = here.page.evaluate("performance.getEntriesByType('resource').map(({name}) => name)")
    assert all(name.startswith(here.url) for name in loaded)
    assert len(loaded) > 5
