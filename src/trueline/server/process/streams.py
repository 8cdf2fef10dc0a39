"""The outputs of one HTTP request, for one reader, however slow it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from trueline.engine.messages import CoreOutput
from trueline.errors import TruelineError


class EngineDead(TruelineError):
    """The engine process is gone, or not there yet; what was asked of it is lost."""

    exit_code = 1


class Stream:
    """An async iterator of CoreOutput, from all sequences of one request. It ends when each has
    its finish_reason. Raises RequestRejected or EngineDead, after what came before.

    Outputs that are not read yet are merged, so a slow reader holds no more than its answer.
    A reader that is cancelled while it waits here has aborted the request; one that leaves at
    another place calls `abort` or `aclose`.
    """

    def __init__(self, names: Sequence[str], abort: Callable[[list[str]], None]) -> None:
        self._open = dict.fromkeys(names)  # whose end the reader has not seen; in order
        self.engines: dict[str, int] = {}
        """Which of several engines each sequence went to."""
        self._abort = abort
        self._pending: dict[str, CoreOutput] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> CoreOutput:
        while not self._pending:
            if not self._open:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            await self._wait()
        return self._next()

    def waiting(self) -> Iterator[CoreOutput]:
        """The other outputs that have come by now."""
        while self._pending:
            yield self._next()

    def _next(self) -> CoreOutput:
        name = next(iter(self._pending))
        output = self._pending.pop(name)
        if output.finish_reason:
            del self._open[name]
        return output

    def abort(self, names: Iterable[str] | None = None) -> None:
        """Nothing more comes of these sequences (None: of all), and the engine drops them."""
        gone = [name for name in (self._open if names is None else names) if name in self._open]
        for name in gone:
            del self._open[name]
            self._pending.pop(name, None)
        if gone:
            self._abort(gone)
        self._wake()

    async def aclose(self) -> None:
        self.abort()

    # -- the client's side -------------------------------------------------------------

    def push(self, output: CoreOutput) -> None:
        name = output.request_id
        if name not in self._open:
            return
        known = self._pending.get(name)
        if known is None:
            self._pending[name] = output
        elif not known.finish_reason:
            _merge(known, output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raised to the reader once it has read what came before."""
        self._error = error
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(known: CoreOutput, later: CoreOutput) -> None:
    known.token_ids += later.token_ids
    known.scores += later.scores
    known.prompt_scores += later.prompt_scores
    known.num_cached_tokens = later.num_cached_tokens or known.num_cached_tokens
    known.first_scheduled = known.first_scheduled or later.first_scheduled
    known.finish_reason = later.finish_reason
    known.stop_reason, known.complete = later.stop_reason, later.complete
    known.error, known.client_error = later.error, later.client_error
