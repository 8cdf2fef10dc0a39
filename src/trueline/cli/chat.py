"""`trueline chat`: talk with a model on a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trueline.cli.remote import ConnectionOptions, SamplingOptions, parse_fields

if TYPE_CHECKING:
    from trueline.client.session import ChatSession


def chat(
    url: str,
    /,
    *,
    message: tuple[str, ...] = (),
    system: str | None = None,
    max_tokens: int | None = None,
    template_kwargs: tuple[str, ...] = (),
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
    connection: ConnectionOptions = ConnectionOptions(),  # noqa: B008
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Talk with a model on any server that speaks OpenAI's protocol.

    On a terminal it asks for messages; /help lists what else it understands, and Ctrl-C stops an
    answer, not the session. Elsewhere every line of stdin is a message.

    Parameters
    ----------
    url
        As http://127.0.0.1:8000, with or without /v1.
    message
        Say this and leave. May be given several times: one turn each.
    system
        The system prompt.
    max_tokens
        Of an answer. Default: the server's.
    template_kwargs
        For the model's chat template, as enable_thinking=false. May be given several times.
    as_json
        Print one JSON object per answer instead of its text.
    quiet
        Do not print speeds and counts after an answer.
    """
    from trueline.client.session import ChatSession

    server = connection.open(url)
    body = {"model": server.pick_model(connection.model), **sampling.body(),
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if template_kwargs:
        body["chat_template_kwargs"] = parse_fields("--template-kwargs", template_kwargs)
    talk = ChatSession(server, body, system)
    interactive = not message and sys.stdin.isatty()
    if interactive:
        print(f"{body['model']}; /help lists commands", file=sys.stderr)
        lines = _typed()
    else:
        lines = iter(message or (line.rstrip("\n") for line in sys.stdin))
    return _converse(talk, lines, interactive, as_json, quiet)


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
        if not text.strip():
            continue
        try:
            _turn(talk, text, as_json, quiet)
        except ServerError as error:
            if not interactive:
                raise
            print(f"trueline: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("(stopped)", file=sys.stderr)
    return 0


def _turn(talk: ChatSession, text: str, as_json: bool, quiet: bool) -> None:
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
    if not quiet:
        print(f"({answer.account()})", file=sys.stderr)


def _typed() -> Iterator[str]:
    """Lines of a terminal, with editing and recall where Python has readline."""
    with suppress(ImportError):
        import_module("readline")
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
