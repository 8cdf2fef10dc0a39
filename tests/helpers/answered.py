"""Answers of a model that was given its words, as an endpoint's writer tells them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from chat_tokenizers import END
from trueline.engine.messages import CoreOutput, TokenScore
from trueline.output_processor import PreparedParams, RequestOutputState
from trueline.outputs import RequestOutput
from trueline.server.answers import ChatAnswers
from trueline.server.protocol import RequestLimits, chat_prompt
from trueline.server.protocol.requests import ChatRequest
from trueline.server.replies import ResponseWriter
from trueline.text.answers import AnswerFormat
from trueline.text.tokenizer import Tokenizer


class Asked(Protocol):
    def __call__(self, body: bytes, limits: RequestLimits) -> ChatRequest: ...


class Answered:
    """`read` and `write` are the endpoint's."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        syntax: str,
        read: Asked,
        write: Callable[[Any, Tokenizer], ResponseWriter],
        limits: RequestLimits,
        **fields: Any,
    ) -> None:
        self.asked = read(json.dumps(fields).encode(), limits)
        self.tokenizer = tokenizer
        self.prompt, self.ids = chat_prompt(self.asked, tokenizer, limits)
        format = AnswerFormat(tokenizer, tool_call_parser=syntax)
        self.reader = ChatAnswers.of(format, self.asked, self.ids).reader
        self._write = write

    def tell(
        self, pieces: Sequence[list[int]], end: str = "stop"
    ) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
        """The events of a stream, with their names, and the whole answer."""
        prepared = PreparedParams(self.asked.params, self.tokenizer)
        state = RequestOutputState("a", None, self.ids, prepared, self.reader)
        writers = [self._write(self.asked, self.tokenizer) for _ in range(2)]
        data = b""
        for i, ids in enumerate(pieces):
            last = i == len(pieces) - 1
            ids = [*ids, END] if last and end == "stop" else ids
            scores = [TokenScore(token, -float(token), 1) for token in ids]
            told = CoreOutput(
                request_id="a", token_ids=ids, scores=scores, finish_reason=end if last else None
            )
            state.update(told)
            data += b"".join(writers[0].delta(self._outputs(state)))
        data += writers[0].end()
        return named_events(data), json.loads(writers[1].whole(self._outputs(state)))

    def _outputs(self, state: RequestOutputState) -> list[RequestOutput]:
        return [state.output]

    def told(self, text: str, end: str = "stop") -> dict[str, Any]:
        """The whole."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.tell([ids], end)[1]


def named_events(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Of a stream whose events have names."""
    found = []
    for each in data.decode().split("\n\n")[:-1]:
        name, _, text = each.partition("\n")
        assert name.startswith("event: ")
        assert text.startswith("data: ")
        event = json.loads(text.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        found.append((event["type"], event))
    return found
