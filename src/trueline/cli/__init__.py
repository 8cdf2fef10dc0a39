"""The command line. One file a verb; none of them imports torch before it has work for it."""

from __future__ import annotations

import sys

from cyclopts import App, CycloptsError, Parameter

from trueline import __version__
from trueline.cli.bench import bench
from trueline.cli.chat import chat
from trueline.cli.complete import complete
from trueline.cli.completion import completion
from trueline.cli.counts import expand_counts
from trueline.cli.eval import command as evaluate
from trueline.cli.generate import generate
from trueline.cli.inspect import inspect_model
from trueline.cli.make_tiny import make_tiny
from trueline.cli.replay import replay
from trueline.cli.report import command as report
from trueline.cli.score import score
from trueline.cli.serve import command as serve
from trueline.cli.verify import verify
from trueline.cli.witness import witness
from trueline.errors import TruelineError


def _shown(default: object) -> str | None:
    """In a help text: that a flag is off or a list empty by default goes without saying."""
    return None if default is None or default is False or default == () else f"{default}" or '""'


app = App(
    name="trueline",
    # --empty-stop and the like: an empty list is what nobody gives
    default_parameter=Parameter(negative_iterable=(), show_default=_shown),
    help="Inference for latent, linear and sparse attention models, with proof that the numbers "
    "are right.\n\nFirst steps: trueline witness --demo, then trueline chat.",
    version=__version__,
    config=expand_counts,
    help_epilogue="Exit codes: 0 fine, 1 a check or a server failed, 2 wrong input, "
    "130 interrupted.",
)
app.command(serve)
app.command(generate, name="generate")
app.command(inspect_model, name="inspect")
app.command(score, name="score")
app.command(evaluate)
app.command(make_tiny, name="make-tiny")
app.command(complete, name="complete")
app.command(chat, name="chat")
app.command(bench)
app.command(witness, name="witness")
app.command(verify, name="verify")
app.command(report)
app.command(replay, name="replay")
app.command(completion, name="completion")


def main(arguments: list[str] | None = None) -> None:
    """Run one command; what a user did wrong ends as one line on stderr."""
    try:
        code = app(arguments, exit_on_error=False, result_action="return_value")
    except CycloptsError:
        code = 2
    except TruelineError as error:
        print(f"trueline: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 0
    sys.exit(code if isinstance(code, int) else 0)
