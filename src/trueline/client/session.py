"""A chat: its messages, and what a line that starts with / does to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from trueline.client.endpoint import Endpoint
from trueline.client.response import StreamedResponse, gather
from trueline.client.wire import Chunk

HELP = """/reset          forget the conversation, keep the system prompt
/system [TEXT]  set the system prompt; without TEXT, show it
/save FILE      write the messages as JSON
/quit           leave (so does Ctrl-D); Ctrl-C stops an answer
Three quotation marks begin and end a message of several lines; what is pasted is one message."""


class ChatSession:
    def __init__(self, server: Endpoint, body: dict[str, object], system: str | None) -> None:
        self.server = server
        self.body = body
        """What every request says beside its messages."""
        self.system = system
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def say(
        self,
        text: str,
        answer: StreamedResponse,
        show: Callable[[StreamedResponse, Chunk], None] | None = None,
    ) -> None:
        """A turn that is stopped half-way keeps what came; one that fails before any text never
        was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        chunks = self.server.ask("chat/completions", self.body | {"messages": asked})
        try:
            gather(chunks, answer, show)
        finally:
            if answer.first is not None or answer.finish_reason:
                self.turns += [asked[-1], {"role": "assistant", "content": answer.text}]

    def command(self, line: str) -> str | None:
        """What to tell the user; None is the end."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return None
        if name == "/reset":
            self.turns.clear()
            return "(a new conversation)"
        if name == "/system":
            if rest:
                self.system = rest
            return f"(system: {self.system or 'none'})"
        if name == "/save":
            return self._save(rest)
        return HELP if name == "/help" else f"({name} is none of these)\n{HELP}"

    def _save(self, name: str) -> str:
        if not name:
            return "(/save FILE)"
        try:
            Path(name).write_text(json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            return f"(not saved: {error})"
        return f"({len(self.messages)} messages written to {name})"
