"""One thread that does, one piece after the other, the work that would block the event loop.

The event loop runs meanwhile: Python switches between threads, and calls that hold the GIL are
short (`protocol.limits` bounds them) or release it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar, TypeVarTuple, cast

T = TypeVar("T")
Given = TypeVarTuple("Given")


class OffloadThread:
    """Not a ThreadPoolExecutor: the interpreter joins its threads at exit, and a template may never
    end."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[asyncio.Future[object], Callable[[], object]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[*Given], T], *given: *Given) -> T:
        """The result of `work(*given)`. Work whose caller was cancelled is not begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trueline-offload", daemon=True)
            self._thread.start()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put((cast("asyncio.Future[object]", done), lambda: work(*given)))
        return await done

    def _work(self) -> None:
        while True:
            done, work = self._jobs.get()
            if done.cancelled():
                continue
            result, error = None, None
            try:
                result = work()
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has ended before
                done.get_loop().call_soon_threadsafe(_settle, done, result, error)
            del done, work, result, error  # nothing of a request is kept until the next one


def _settle(done: asyncio.Future[object], result: object, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
