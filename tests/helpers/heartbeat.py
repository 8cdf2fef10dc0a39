"""`trueline` with a heart that beats on the server's event loop, and tells how much CPU time its
whole process has used between two beats. Of the process, because a thread that holds the
interpreter's lock stops the loop as well, and other programs do not; CPU time, because a busy
machine slows both alike."""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

BEATS = 0.005
_FORM = struct.Struct("ddd")


class Heart:
    """Shared by the two processes: how many beats, the worst gap, the CPU time at the last beat."""

    def __init__(self, file: Path) -> None:
        self.each = 0.0
        if not file.exists():
            file.write_bytes(bytes(_FORM.size))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _FORM.size)

    def read(self) -> tuple[float, float, float]:
        return _FORM.unpack(self._memory)

    def write(self, beats: float, worst: float, cpu: float) -> None:
        self._memory[:] = _FORM.pack(beats, worst, cpu)

    # -- the test's side -------------------------------------------------------------------

    def settled(self) -> tuple[float, float, float]:
        """What `read` gives, once the loop has beaten twice again."""
        seen, end = self.read()[0], time.monotonic() + 120
        while self.read()[0] < seen + 2:
            assert time.monotonic() < end, "the event loop is dead"
            time.sleep(0.002)
        return self.read()

    def measured(self, work: Callable[[], object]) -> tuple[float, float]:
        """The worst gap within, and the CPU time that it took, without what beating takes."""
        beats, _, before = self.settled()
        self._memory[8:16] = struct.pack("d", 0.0)
        work()
        more, worst, after = self.settled()
        return worst, after - before - (more - beats) * self.each

    def rest(self, seconds: float = 0.5) -> None:
        """Learn what a beat takes, while there is nothing else to do."""
        self.each = 0.0
        beats = self.settled()[0]
        _, cost = self.measured(lambda: time.sleep(seconds))
        self.each = cost / (self.read()[0] - beats)

    # -- the server's side -----------------------------------------------------------------

    async def beat(self) -> None:
        last, beats = time.process_time(), 0
        while True:
            await asyncio.sleep(BEATS)
            now, beats = time.process_time(), beats + 1
            self.write(beats, max(self.read()[1], now - last), now)
            last = now


def main() -> None:
    from trueline.cli import main as cli
    from trueline.server import run

    whole, heart = run._Lifespan.run, Heart(Path(sys.argv[1]))

    async def beating(self: run._Lifespan) -> int:
        task = asyncio.create_task(heart.beat())
        try:
            return await whole(self)
        finally:
            task.cancel()

    run._Lifespan.run = beating  # type: ignore[method-assign]
    cli(sys.argv[2:])


if __name__ == "__main__":
    main()
