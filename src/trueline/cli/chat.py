"""`trueline chat`: talk with a model on a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trueline.cli.arguments import ANY_TEXT, model_or_default
from trueline.cli.completion import MODEL
from trueline.cli.messages import piped, read_tools, said, typed
from trueline.cli.remote import ConnectionOptions, SamplingOptions, parse_fields
from trueline.errors import UsageError, nearest
from trueline.utils.builtin import BUILTIN_MODELS, SAMPLE_PROBLEM, TRAINED_LEN, builtin_model
from trueline.utils.hub import SCHEME

if TYPE_CHECKING:
    from trueline.client.endpoint import Endpoint
    from trueline.client.response import StreamedResponse
    from trueline.client.session import ChatSession


def chat(
    url: Annotated[str | None, MODEL] = None,
    /,
    *,
    message: Annotated[tuple[str, ...], ANY_TEXT] = (),
    system: Annotated[str | None, ANY_TEXT] = None,
    max_tokens: int | None = None,
    template_kwargs: tuple[str, ...] = (),
    tools: Path | None = None,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
    connection: ConnectionOptions = ConnectionOptions(),  # noqa: B008
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Talk with a model: on any server that speaks OpenAI's protocol, or on a private one that is
    started for it.

    On a terminal it asks for messages; /help lists what else it understands, and Ctrl-C stops an
    answer, not the session. Elsewhere every line of stdin is a message. A message of several
    lines stands between triple quotation marks.

    Parameters
    ----------
    url
        As http://127.0.0.1:8000, with or without /v1. A model directory or the name of a
        built-in model instead starts a private server of it, which ends on leaving; so does
        --model without URL, which also takes a hub id (here: hf://owner/name). Default: a private
        server of the built-in witness-v3.
    message
        Say this and leave; - is all of stdin. May be given several times: one turn each.
    system
        The system prompt.
    max_tokens
        Of an answer. Default: the server's.
    template_kwargs
        For the model's chat template, as enable_thinking=false. May be given several times.
    tools
        A JSON file with a list of tools that the model may call, as OpenAI's. Calls are shown, not
        run: the next message is what the call found, and so on for each of them.
    as_json
        Print one JSON object per answer instead of its text.
    quiet
        Do not print speeds and counts after an answer.
    """
    from trueline.client.session import ChatSession

    body = {**sampling.body(), "stream": True, "stream_options": {"include_usage": True}}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if template_kwargs:
        body["chat_template_kwargs"] = parse_fields("--template-kwargs", template_kwargs)
    if tools is not None:
        body["tools"] = read_tools(tools)
    interactive = not message and sys.stdin.isatty()
    with _server(url, connection, quiet) as (server, model):
        talk = ChatSession(server, {"model": model, **body}, system)
        if interactive:
            print(f"{model}; /help lists commands", file=sys.stderr)
            if builtin_model(model):
                print(f"It solves arithmetic stories, as: {SAMPLE_PROBLEM}", file=sys.stderr)
            lines = typed()
        else:
            lines = map(said, message) if message else piped()
        return _converse(talk, lines, interactive, as_json, quiet)


@contextmanager
def _server(
    url: str | None, connection: ConnectionOptions, quiet: bool
) -> Iterator[tuple[Endpoint, str]]:
    """The server that was given, or a private one; and the name of its model."""
    if url is not None and not _is_model(url):
        server = connection.open(url)
        yield server, server.pick_model(connection.model)
        return
    from trueline.cli.private_server import private_server

    if url is not None and connection.model is not None:
        raise UsageError(f"{url} is a model, and so is --model {connection.model}: give one")
    model = model_or_default(url or connection.model)
    with private_server(model, connection.timeout, quiet=quiet) as server:
        yield server, server.pick_model(None)


def _is_model(text: str) -> bool:
    """Also what was meant as one: its error then names the models there are."""
    if text.startswith((".", "/", "~", SCHEME)) or Path(text).is_dir():
        return True
    return nearest(text, BUILTIN_MODELS) is not None


def _converse(
    talk: ChatSession, lines: Iterator[str], interactive: bool, as_json: bool, quiet: bool
) -> int:
    from trueline.client.wire import ServerError

    for line in lines:
        if line.startswith("/") and not line.startswith("//"):
            reply = talk.command(line)
            if reply is None:
                break
            print(reply, file=sys.stderr)
            continue
        text = line[1:] if line.startswith("//") else line
        if not text.strip() and not talk.calls:
            continue
        answers = bool(talk.calls)
        if answers and not talk.result(text):
            _ask_result(talk)
            continue
        try:
            _turn(talk, None if answers else text, as_json, quiet)
        except ServerError as error:
            if not interactive:
                raise
            print(f"trueline: {error}", file=sys.stderr)
            if talk.turns and error.kind == "HTTP 400":  # as one that is longer than the model's
                print("(/reset begins a new conversation)", file=sys.stderr)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("(stopped)", file=sys.stderr)
    return 0


def _ask_result(talk: ChatSession) -> None:
    print(f"(what did {talk.calls[0].name} find?)", file=sys.stderr)


def _turn(talk: ChatSession, text: str | None, as_json: bool, quiet: bool) -> None:
    from trueline.client.live import Screen
    from trueline.client.response import StreamedResponse

    answer = StreamedResponse()
    if as_json:
        talk.say(text, answer)
        print(json.dumps(answer.as_json(), ensure_ascii=False), flush=True)
    else:
        screen = Screen()
        try:
            with screen.answering():
                talk.say(text, answer, screen.show)
        finally:
            if answer.first is not None:
                print(flush=True)
    if talk.calls:
        _ask_result(talk)
    if not quiet:
        print(f"({answer.account()})", file=sys.stderr)
        _doubt_long_conversation(answer)


def _doubt_long_conversation(answer: StreamedResponse) -> None:
    builtin = builtin_model(answer.model or "")
    if builtin is None or answer.usage is None:
        return
    length = answer.usage.prompt_tokens + answer.usage.completion_tokens
    if length > TRAINED_LEN:
        print(
            f"(doubtful: this conversation has {length:,} tokens, and {builtin.name} was trained "
            f"on up to {TRAINED_LEN:,}; /reset begins a new one)",
            file=sys.stderr,
        )
