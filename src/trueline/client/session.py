"""A chat: its messages, and what a line that starts with / does to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from trueline.client.endpoint import Endpoint
from trueline.client.response import ReceivedCall, StreamedResponse, gather
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
        self.turns: list[dict[str, object]] = []
        self.calls: list[ReceivedCall] = []
        """What was called and has no result yet: the next lines are results, one for each."""

    @property
    def messages(self) -> list[dict[str, object]]:
        first: list[dict[str, object]] = []
        if self.system:
            first.append({"role": "system", "content": self.system})
        return first + self.turns

    def result(self, text: str) -> bool:
        """What the first of `calls` has found; whether that was the last of them."""
        call = self.calls.pop(0)
        self.turns.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return not self.calls

    def say(
        self,
        text: str | None,
        answer: StreamedResponse,
        show: Callable[[StreamedResponse, Chunk], None] | None = None,
    ) -> None:
        """A turn that is stopped half-way keeps what came; one that fails before any text never
        was. Without a text, the model goes on from the results of its calls."""
        said: list[dict[str, object]] = []
        if text is not None:
            said = [{"role": "user", "content": text}]
        chunks = self.server.ask("chat/completions", self.body | {"messages": self.messages + said})
        try:
            gather(chunks, answer, show)
        finally:
            if answer.first is not None or answer.finish_reason:
                calls = list(answer.calls.values()) if answer.finish_reason == "tool_calls" else []
                called = {"tool_calls": answer.call_messages} if calls else {}
                self.turns += [*said, {"role": "assistant", "content": answer.text, **called}]
                self.calls = calls

    def command(self, line: str) -> str | None:
        """What to tell the user; None is the end."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return None
        if name == "/reset":
            self.turns.clear()
            self.calls.clear()
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
