"""Where a model is: a directory, a built-in model, or a repository of a hub, which is fetched.

Only `owner/name`, where no such directory and no directory `owner` is here, goes to the hub: no
path and no misspelt name of a built-in model does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trueline.errors import UsageError, did_you_mean, short
from trueline.utils.builtin import BUILTIN_MODELS, builtin_model
from trueline.utils.environment import hub_cache
from trueline.utils.model_files import WEIGHTS

LONGEST_PATH = 4096
SCHEME = "hf://"
"""Before a hub id, where a directory here has its owner's name."""
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9_./-]*))?")
ACCEPTED = "a model directory, a hub id (owner/name, owner/name@revision), or a built-in model"

Check = Callable[[Path], object]


@dataclass(frozen=True)
class HubId:
    name: str
    """With its owner's."""
    revision: str | None
    """A branch, a tag or a commit; None: the main branch."""

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def folder(self) -> Path:
        """In the local cache, which is that of Hugging Face's tools."""
        return hub_cache() / f"models--{self.name.replace('/', '--')}"


def find_model(model: str | Path, *, weights: bool = True, check: Check | None = None) -> Path:
    """The name of a built-in model means that one, also where a directory here has the same name:
    ./NAME is the directory. `check` sees a hub's config.json before weights are fetched; without
    `weights` none are."""
    builtin = builtin_model(model)
    if builtin is not None:
        if not builtin.path.is_dir():
            raise UsageError(
                f"built-in model '{model}': its files are not installed ({builtin.path})"
            )
        return builtin.path
    path = Path(model)
    if path.is_dir():
        return path
    found = hub_id(model)
    if found is not None:
        from trueline.utils.hub_download import download

        return download(found, weights, check)
    raise _not_found(str(model))


def hub_id(model: str | Path) -> HubId | None:
    """None for whatever looks like a path: nobody is to be asked for a directory misspelt."""
    if not isinstance(model, str):
        return None
    text = model.removeprefix(SCHEME)
    match = _HUB_ID.fullmatch(text)
    if match is None or any(odd in match["name"] for odd in ("..", "--")):
        return None
    if text == model and Path(text.partition("/")[0]).is_dir():
        return None
    return HubId(match["name"], match["revision"])


def model_name(model: str) -> str:
    """What it is served as: the directory's name, or the hub's, without the owner's."""
    found = hub_id(model)
    return Path(found.name if found is not None else model).name or model


def find_config(model: str | Path) -> tuple[Path, bool]:
    """Of a model, or of nothing but its config.json: the directory, and whether weights are in it
    (else they can be drawn)."""
    path = Path(model)
    if path.is_file():
        return path.parent, False
    directory = find_model(model)
    return directory, any(directory.glob(f"*{WEIGHTS}"))


def cached_models() -> list[str]:
    """Hub ids of models of which something is in the local cache."""
    folders = sorted(hub_cache().glob("models--*--*"))
    names = (folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)
    return [name for name in names if cached_snapshot(HubId(name, None)) is not None]


def cached_snapshot(found: HubId) -> Path | None:
    """The revision as it was when it was last fetched. Of a model without one named `main`, the
    only one there is."""
    snapshots = found.folder / "snapshots"
    reference = found.folder / "refs" / (found.revision or "main")
    if reference.is_file():
        named = snapshots / reference.read_text().strip()
        if named.is_dir():
            return named
    if found.revision is not None:
        commit = snapshots / found.revision
        return commit if commit.is_dir() else None
    there = [path for path in snapshots.glob("*") if path.is_dir()]
    return there[0] if len(there) == 1 else None


def _not_found(name: str) -> UsageError:
    what = f"model '{short(name, LONGEST_PATH)}': no such directory"
    owner = name.partition("/")[0]
    if name.count("/") == 1 and Path(owner).is_dir() and _HUB_ID.fullmatch(name):
        return UsageError(
            f"{what}, though there is {owner}/, so it is not looked for on a hub; {SCHEME}{name} is"
        )
    return UsageError(
        f"{what}; accepted: {ACCEPTED} ({', '.join(BUILTIN_MODELS)})"
        f"{did_you_mean(name, BUILTIN_MODELS)}"
    )
