"""What caches store, byte by byte, in every dtype and layout that a cache of this model may have:
one that this machine does not choose, another does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trueline.cache.kinds.entries import EntriesIndex
from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.kinds.latent import Latent
from trueline.verify.latent_cache import latent_bytes_are_described
from trueline.verify.sparse import index_bytes_are_described
from trueline.verify.suite.outcome import Outcome, Todo
from trueline.verify.suite.session import Session

INVARIANT = "stored = described"


def checks(session: Session) -> Iterator[Todo]:
    plan = session.plan
    if plan.kind(Latent):
        yield _todo("latents in fp8", latent_bytes_are_described)
    if plan.kind(IndexKeys) or plan.kind(EntriesIndex):
        yield _todo("index keys", index_bytes_are_described)


def _todo(name: str, run: Callable[[], None]) -> Todo:
    def carried_out() -> Outcome:
        run()
        return Outcome("in every layout and dtype, blocks of several sizes")

    what = f"{name}, in every layout: bytes as described, read as written, no byte beside them"
    return Todo(f"caches/{name}", INVARIANT, what, carried_out)
