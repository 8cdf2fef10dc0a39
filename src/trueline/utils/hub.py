"""Where a model is: a directory, a built-in model, or a hub id that an earlier download left in the
local cache. Nothing is ever fetched."""

from __future__ import annotations

from pathlib import Path

from trueline.errors import UsageError, did_you_mean
from trueline.utils.builtin import BUILTIN_MODELS, builtin_model
from trueline.utils.environment import hub_cache


def find_model(model: str | Path) -> Path:
    """The name of a built-in model means that one, also where a directory here has the same name:
    ./NAME is the directory."""
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
    name = str(model)
    if name.count("/") == 1 and not name.startswith((".", "/")):
        folder = hub_cache() / f"models--{name.replace('/', '--')}"
        snapshot = _snapshot(folder)
        if snapshot is not None:
            return snapshot
        raise UsageError(
            f"model '{name}': no such directory, and not in the local cache ({folder}); "
            "accepted: a model directory, or a hub id downloaded before (nothing is fetched)"
        )
    raise UsageError(
        f"model '{name}': no such directory; accepted: a model directory, a hub id, or a built-in "
        f"model ({', '.join(BUILTIN_MODELS)}){did_you_mean(name, BUILTIN_MODELS)}"
    )


def find_config(model: str | Path) -> tuple[Path, bool]:
    """Of a model, or of nothing but its config.json: the directory, and whether weights are in it
    (else they can be drawn)."""
    path = Path(model)
    if path.is_file():
        return path.parent, False
    directory = find_model(model)
    return directory, any(directory.glob("*.safetensors"))


def cached_models() -> list[str]:
    """Hub ids of models that find_model would find in the local cache."""
    folders = sorted(hub_cache().glob("models--*--*"))
    return [
        folder.name.removeprefix("models--").replace("--", "/", 1)
        for folder in folders
        if _snapshot(folder) is not None
    ]


def _snapshot(folder: Path) -> Path | None:
    """The revision that `main` names, or the only one there is."""
    main = folder / "refs" / "main"
    if main.is_file():
        named = folder / "snapshots" / main.read_text().strip()
        if named.is_dir():
            return named
    found = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return found[0] if len(found) == 1 else None
