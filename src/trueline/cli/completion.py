"""`trueline completion`: what makes a shell complete verbs, options and models at Tab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import Parameter

from trueline.utils.builtin import BUILTIN_MODELS
from trueline.utils.hub import cached_models

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

# Where no model's name fits, Tab goes on to paths, as for any other command.
BASH_PATHS = "complete -o bashdefault -o default -F _trueline trueline\n"
ZSH_NAMES = "compadd -d _cyc_disp -a _cyc_vals\n"
ZSH_PATHS = ZSH_NAMES + "    _files\n"
ZSH_USE = "compdef _cyclopts_trueline trueline\n"


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script that makes a shell complete verbs, options and models.

    In ~/.bashrc: source <(trueline completion bash). In ~/.zshrc, after compinit: source
    <(trueline completion zsh). In ~/.config/fish/config.fish: trueline completion fish | source.

    Parameters
    ----------
    shell
        The one to print it for.
    """
    from trueline.cli import app

    script = app.generate_completion(prog_name="trueline", shell=shell)
    match shell:
        case "bash":
            script += BASH_PATHS
        case "zsh":
            script = script.replace(ZSH_NAMES, ZSH_PATHS) + ZSH_USE
    print(script, end="")


def known_models(context: CompletionContext) -> Iterator[tuple[str, str]]:
    """What may stand where a verb takes a model, each with a word about it."""
    for model in BUILTIN_MODELS.values():
        yield model.name, model.stands_for
    for name in cached_models():
        yield name, "in the local cache"
    begun = context.incomplete
    folder = begun[: begun.rfind("/") + 1]
    for config in sorted(Path(folder or ".").expanduser().glob("*/config.json")):
        yield folder + config.parent.name, "a directory here"


MODEL = Parameter(completer=known_models)
"""Of an argument that is a model's name or directory."""
