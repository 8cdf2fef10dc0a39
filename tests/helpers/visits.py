"""A visit to the chat page in a real browser: what a user does there, and what the page did that it
must not. Nobody but the server is asked, the policy is never broken, the console has no errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Request

DESKTOP = {"viewport": {"width": 1100, "height": 760}}
PHONE = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
MILLISECONDS = 20_000
"""That anything may take."""


class Visit:
    def __init__(
        self,
        browser: Browser,
        url: str,
        *,
        settings: dict[str, Any] | None = None,
        conversation: str = "[]",
        **options: Any,
    ) -> None:
        """In a profile of its own, where so much is stored. `options`: of the browser's context."""
        context = browser.new_context(**(DESKTOP | options))
        context.set_default_timeout(MILLISECONDS)
        for name, text in (
            ("settings", json.dumps(settings or {})),
            ("conversation", conversation),
        ):
            context.add_init_script(f"localStorage['trueline.{name}'] ??= {json.dumps(text)}")
        self.url = f"{url}/"
        self.faults: list[str] = []
        self.accepted: list[str] = []
        """Parts of the faults that the test expects."""
        self.page = context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        self.page.on("request", self._request)
        self.page.goto(self.url)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith(self.url):
            self.faults.append(f"request: {request.url}")

    def close(self) -> list[str]:
        """Its faults."""
        self.page.context.close()
        return [f for f in self.faults if not any(part in f for part in self.accepted)]

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def button(self, name: str) -> Locator:
        """The last of this name."""
        return self.page.get_by_role("button", name=name, exact=True).last

    def send(self, text: str) -> None:
        """And waits for the end of the answer."""
        self.find("#prompt").fill(text)
        self.button("Send").click()
        self.wait_until_idle()

    def wait_until_ready(self) -> None:
        self.find('#health[data-status="ready"]').wait_for()

    def wait_until_idle(self) -> None:
        self.find("#send").wait_for()

    def said(self) -> list[str]:
        """What the messages say, as it is seen."""
        return self.find(".message > .content").all_inner_texts()

    def stored(self, key: str) -> Any:
        return self.page.evaluate(f"JSON.parse(localStorage['trueline.{key}'] ?? 'null')")
