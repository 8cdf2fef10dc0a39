"""`trueline complete`: continue a text on a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trueline.cli.arguments import ANY_TEXT
from trueline.cli.messages import read_stdin
from trueline.cli.remote import ConnectionOptions, SamplingOptions
from trueline.errors import UsageError


def complete(
    url: str,
    /,
    *,
    prompt: Annotated[str | None, ANY_TEXT] = None,
    prompt_file: Annotated[Path | None, ANY_TEXT] = None,
    max_tokens: int = 64,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
    connection: ConnectionOptions = ConnectionOptions(),  # noqa: B008
    stream: Annotated[bool, Parameter(negative="--no-stream")] = True,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Continue a text on any server that speaks OpenAI's protocol, and show it as it comes.

    What follows goes to stdout; times, tokens per second and token counts go to stderr.

    Parameters
    ----------
    url
        As http://127.0.0.1:8000, with or without /v1.
    prompt
        Text to continue. Default: what comes from stdin, to the last byte; on a terminal what is
        typed, up to Ctrl-D.
    prompt_file
        A file with the text instead; - is stdin.
    stream
        Without it the answer comes whole, at its end.
    as_json
        Print one JSON object instead of the text.
    quiet
        Do not print the account at the end.
    """
    text = _text(prompt, prompt_file)
    from trueline.client.live import Screen
    from trueline.client.response import StreamedResponse, gather

    server = connection.open(url)
    body = {"model": server.pick_model(connection.model), "prompt": text, "max_tokens": max_tokens}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = StreamedResponse()
    chunks = server.ask("completions", body | sampling.body())
    if as_json:
        print(json.dumps(gather(chunks, answer).as_json(), ensure_ascii=False))
    else:
        screen = Screen()
        try:
            with screen.answering():
                gather(chunks, answer, screen.show)
        finally:
            print(flush=True)
    if not quiet:
        print(answer.account(), file=sys.stderr)


def _text(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise UsageError("give one of --prompt and --prompt-file")
    if prompt is not None:
        return prompt
    if file is None and sys.stdin.isatty():
        print("(the text to continue; Ctrl-D ends it)", file=sys.stderr)
        return read_stdin().removesuffix("\n")  # Ctrl-D needs a line of its own
    if file is None or str(file) == "-":
        return read_stdin()
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {file}: not readable ({error})") from error
