"""Fetches a model's files from a hub through huggingface_hub, into the cache of Hugging Face's
tools. Only files that we read: nothing that is run, and no pickles."""

from __future__ import annotations

import errno
import glob
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline.errors import TruelineError, UsageError, described
from trueline.utils.download_bar import Bar, download_bar
from trueline.utils.environment import hub_cache
from trueline.utils.hub import Check, HubId, cached_snapshot
from trueline.utils.model_files import SMALL_FILES, WEIGHT_INDEX, WEIGHTS, weight_files
from trueline.utils.progress import human_bytes

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

ROUNDS = 5
"""After connections that were reset. Files that are complete stay."""
EXTRA = "pip install 'trueline[hub]'"
AGAIN = "what is complete stays: run the same command again to go on"


def download(found: HubId, weights: bool, check: Check | None) -> Path:
    """The directory of its files. The hub is asked what the revision is now; where it cannot be
    reached, or HF_HUB_OFFLINE is set, what was fetched earlier is taken."""
    if find_spec("huggingface_hub") is None:
        return _cached(found, f"fetching needs huggingface_hub: {EXTRA}")
    with _errors(found):
        from huggingface_hub.errors import RevisionResolutionError

        try:
            revision = _resolve(found)
        except RevisionResolutionError as error:
            return _cached(found, str(error).rpartition(": ")[2])
        directory = _fetch(found, revision, SMALL_FILES, Bar)
        if weights:
            _fetch_weights(found, revision, directory, check)
        return directory


def _resolve(found: HubId) -> ResolvedRevision:
    from huggingface_hub import HfApi, is_offline_mode

    return HfApi(library_name="trueline").resolve_revision(
        found.name,
        revision=found.revision,
        cache_dir=hub_cache(),
        local_files_only=is_offline_mode(),
    )


def _fetch_weights(
    found: HubId, revision: ResolvedRevision, directory: Path, check: Check | None
) -> None:
    wanted = _weights(found, directory, _names(found, revision))
    missing = [name for name in wanted if not (directory / name).is_file()]
    if not missing:
        return
    if check is not None:
        check(directory)
    patterns = [glob.escape(name) for name in missing]
    total = _bytes_to_fetch(found, revision, patterns)
    _check_space(found, total)
    print(f"{found}: {human_bytes(total)} of weights to fetch, to {directory}", file=sys.stderr)
    with download_bar("fetching weights", total) as bar:
        _fetch(found, revision, patterns, bar)


def _fetch(
    found: HubId, revision: ResolvedRevision, patterns: Sequence[str], bar: type[Bar]
) -> Path:
    from httpx2 import TransportError
    from huggingface_hub import snapshot_download

    given: Any = bar  # like tqdm's class, and not a subclass
    for left in reversed(range(ROUNDS)):
        try:
            path = snapshot_download(
                found.name,
                revision=revision,
                cache_dir=hub_cache(),
                allow_patterns=list(patterns),
                library_name="trueline",
                tqdm_class=given,
            )
            return Path(path)
        except TransportError as error:
            if not left:
                raise
            print(f"{found}: {described(error)}; going on", file=sys.stderr)
    raise AssertionError("unreachable")


def _bytes_to_fetch(found: HubId, revision: ResolvedRevision, patterns: list[str]) -> int:
    """Files that another revision has too are there already."""
    from huggingface_hub import snapshot_download

    silent: Any = Bar
    planned = snapshot_download(
        found.name,
        revision=revision,
        cache_dir=hub_cache(),
        allow_patterns=patterns,
        library_name="trueline",
        tqdm_class=silent,
        dry_run=True,
    )
    return sum(file.file_size or 0 for file in planned if file.will_download)


def _names(found: HubId, revision: ResolvedRevision) -> set[str]:
    """Of all files of the repository; empty where an older program fetched them."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(found.name, revision=revision, cache_dir=hub_cache())
    except CachedRepoTreeNotFoundError:
        return set()
    return {file.path for file in tree}


def _weights(found: HubId, directory: Path, there: AbstractSet[str]) -> list[str]:
    named = _indexed(directory)
    if named is None:
        named = weight_files(there)
    if there and not named:
        raise UsageError(
            f"model '{found}': the repository has no *{WEIGHTS} beside its config; accepted: "
            "weights in safetensors (others are not read: a pickle can run anything)"
        )
    if gone := [name for name in named if there and name not in there]:
        raise UsageError(f"model '{found}': its {WEIGHT_INDEX} names {gone[0]}, which it has not")
    return named


def _indexed(directory: Path) -> list[str] | None:
    """Files that the index names. What is odd in it is told when weights are read."""
    try:
        names = set(json.loads((directory / WEIGHT_INDEX).read_bytes())["weight_map"].values())
        return sorted(name for name in names if Path(name).name == name)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _check_space(found: HubId, needed: int) -> None:
    place = next(path for path in (hub_cache(), *hub_cache().absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UsageError(
            f"model '{found}': {human_bytes(needed)} to fetch, {human_bytes(free)} free in "
            f"{hub_cache()}; make room, or set HF_HUB_CACHE to another place"
        )


def _cached(found: HubId, why: str) -> Path:
    directory = cached_snapshot(found)
    if directory is None:
        raise UsageError(
            f"model '{found}': no such directory, and not in the local cache "
            f"({found.folder}); {why}"
        )
    _check_complete(found, directory, _indexed(directory) or [])
    return directory


def _check_complete(found: HubId, directory: Path, names: Sequence[str]) -> None:
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UsageError(
            f"model '{found}': {len(missing)} of its files are not in the local cache, "
            f"{missing[0]} among them ({directory}), and the hub cannot be asked for them"
        )


@contextmanager
def _errors(found: HubId) -> Iterator[None]:
    """Whatever goes wrong over there, in one sentence with a way out."""
    try:
        yield
    except TruelineError:
        raise
    except Exception as error:
        raise UsageError(f"model '{found}': {_said(found, error)}") from error


def _said(found: HubId, error: Exception) -> str:
    from huggingface_hub import constants, errors, get_token

    hub = constants.ENDPOINT
    token = "the token sent is not enough" if get_token() else "set HF_TOKEN to a token of yours"
    match error:
        case ImportError() | AttributeError():
            return f"fetching needs a newer huggingface_hub ({described(error)}): {EXTRA}"
        case errors.GatedRepoError():
            return f"gated: ask for access on {hub}/{found.name}, and {token}"
        case errors.RepositoryNotFoundError():
            return f"not found on {hub}, or private ({token})"
        case errors.RevisionNotFoundError():
            return f"{hub} has no such revision; accepted: a branch, a tag or a commit of its"
        case errors.HfHubHTTPError() if error.response.status_code == 401:
            return (
                f"{hub} does not accept the token (HF_TOKEN, or the one that `hf auth login` left)"
            )
        case errors.HfHubHTTPError() if error.response.status_code == 403:
            return f"{hub} forbids it: {token}, or it may not read this model"
        case errors.LocalEntryNotFoundError() | errors.DryRunError():
            cause = error.__cause__ or error
            return f"files are missing, and {hub} did not give them ({described(cause)}); {AGAIN}"
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left in {hub_cache()}; make room, or set HF_HUB_CACHE; {AGAIN}"
        case OSError() if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            return f"{hub_cache()} cannot be written ({error.strerror}); set HF_HUB_CACHE"
    return f"{described(error)} ({hub}); {AGAIN}"
