"""Progress of a download, as huggingface_hub tells it to a class like tqdm's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trueline.utils.progress import progress_bar


class Bar:
    """Shows nothing. It has what huggingface_hub asks of bars."""

    def __init__(self, *_: object, total: float | None = None, **__: object) -> None:
        self.n, self.total = 0.0, total
        self.format_dict: dict[str, Any] = {}

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0

    def nothing(self, *_: object, **__: object) -> None: ...

    close = refresh = reset = clear = nothing
    set_description = set_description_str = set_postfix = set_postfix_str = nothing


@contextmanager
def download_bar(title: str, total: int) -> Iterator[type[Bar]]:
    """A class of bars. Bytes that have come are shown; an interrupt ends the threads that get them,
    each at its next piece, where they would finish their files first."""
    stopped = threading.Event()
    with progress_bar(title) as report, _at_interrupt(stopped.set):

        class BytesBar(Bar):
            def __init__(self, *args: object, unit: str = "", **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.counts_bytes = unit == "B"

            def update(self, n: float | None = 1) -> None:
                if stopped.is_set():
                    raise InterruptedError
                super().update(n)
                if self.counts_bytes and self.n:
                    report(int(self.n), total)

        yield BytesBar


@contextmanager
def _at_interrupt(tell: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        tell()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
