"""Tools that requests offer, and models of every format that call them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chat_answers import chat_format
from chat_tokenizers import END, TEMPLATE, VOCAB, chat_tokenizer
from trueline.engine.messages import CoreOutput, TokenScore
from trueline.output_processor import PreparedParams, RequestOutputState
from trueline.outputs import CompletionOutput
from trueline.server.answers import ChatAnswers
from trueline.server.protocol import ChatWriter, RequestLimits, chat_prompt, read_chat
from trueline.text.answers import AnswerFormat
from trueline.text.tokenizer import Tokenizer

LIMITS = RequestLimits(models=("tiny",), max_model_len=8192, vocab_size=VOCAB)
USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters}) | more
    return {"type": "function", "function": function}


TOOLS = [tool("get_weather", WEATHER), tool("now")]


def calling_tokenizer(
    directory: Path, syntax: str, *, as_tokens: bool = True, template: str = TEMPLATE
) -> Tokenizer:
    """Whose template thinks only where it is told to."""
    marks = chat_format(syntax).spellings if as_tokens else ("<think>", "</think>")
    directory.mkdir(parents=True, exist_ok=True)
    return chat_tokenizer(directory, marks, template=template)


class Chat:
    """A request, its prompt, and its answer as a client gets it."""

    def __init__(self, tokenizer: Tokenizer, syntax: str, **fields: Any) -> None:
        switch = {"chat_template_kwargs": {"enable_thinking": False}}
        defaults = {"messages": [USER], "max_tokens": 1000, "tools": TOOLS}
        body = json.dumps(defaults | switch | fields).encode()
        self.asked = read_chat(body, LIMITS)
        self.tokenizer = tokenizer
        self.prompt, self.ids = chat_prompt(self.asked, tokenizer, LIMITS)
        format = AnswerFormat(tokenizer, tool_call_parser=syntax)
        self.answers = ChatAnswers.of(format, self.asked, self.ids)

    def answer(self, pieces: Sequence[list[int]], end: str = "stop") -> CompletionOutput:
        """What is read of these tokens, and that a stream says what the whole says."""
        prepared = PreparedParams(self.asked.params, self.tokenizer)
        state = RequestOutputState("a", None, self.ids, prepared, self.answers.reader)
        writers = [ChatWriter("c", 0, "f", self.asked, self.tokenizer) for _ in range(2)]
        self.chunks: list[dict[str, Any]] = []
        for i, ids in enumerate(pieces):
            last = i == len(pieces) - 1
            ids = [*ids, END] if last and end == "stop" else ids
            scores = [TokenScore(token, -1.0, 1) for token in ids]
            told = CoreOutput(
                request_id="a", token_ids=ids, scores=scores, finish_reason=end if last else None
            )
            state.update(told)
            self.chunks += [json.loads(c[6:]) for c in writers[0].delta([state.output])]
        self.whole = json.loads(writers[1].whole([state.output]))["choices"][0]
        message, reason = joined(self.chunks)
        assert without_broken(message) == self.whole["message"]
        assert reason == self.whole["finish_reason"]
        (found,) = state.output.outputs
        return found

    def told(self, text: str, end: str = "stop") -> dict[str, Any]:
        """The message; a token at a time."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.answer([[token] for token in ids], end)
        message: dict[str, Any] = self.whole["message"]
        return message


def joined(chunks: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """The message that a stream's chunks say, and why it ended."""
    message: dict[str, Any] = {"content": "", "refusal": None}
    calls: dict[int, dict[str, Any]] = {}
    malformed: list[dict[str, Any]] = []
    reason = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert reason is None, "what ends an answer comes last"
        reason = choice["finish_reason"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                assert reason is None, "clients take a call for done by a chunk that follows it"
                (each,) = value  # clients read the first of a list and no other
                _join_call(calls, each)
            elif name == "malformed_tool_calls":
                malformed += value
            else:
                message[name] = message.get(name, "") + value
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    if malformed:
        message["malformed_tool_calls"] = malformed
    return message, reason


def _join_call(calls: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    index, function = piece["index"], piece["function"]
    if index not in calls:
        assert piece["type"] == "function"
        calls[index] = {
            "id": piece["id"],
            "type": "function",
            "function": {"name": function["name"], "arguments": ""},
        }
    else:
        assert piece.keys() == {"index", "function"}
        assert function.keys() == {"arguments"}
    calls[index]["function"]["arguments"] += function["arguments"]


def without_broken(message: dict[str, Any]) -> dict[str, Any]:
    """What a stream has told, less the calls that it said are malformed."""
    told = message.get("malformed_tool_calls", ())
    broken = {each["index"] for each in told if each["index"] is not None}
    calls = [c for i, c in enumerate(message.get("tool_calls", ())) if i not in broken]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    if calls:
        return rest | {"tool_calls": calls, "content": rest["content"] or None}
    return rest
