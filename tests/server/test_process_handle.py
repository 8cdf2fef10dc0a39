"""How the engine process ends, seen from its parent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trueline.server.process.process_handle import ProcessHandle, how_it_ended


@pytest.mark.parametrize(
    ("code", "told"),
    [(0, "ended with exit code 0"), (3, "ended with exit code 3"), (-9, "was killed by SIGKILL")],
)
def test_ends_are_told(code: int, told: str) -> None:
    assert how_it_ended(code) == f"the engine process {told}"


def test_nothing_is_left_of_a_process_that_never_connected() -> None:
    """Its directory goes, its end is told once, and sending to it is no error."""
    ends: list[int] = []

    async def killed() -> Path:
        handle = ProcessHandle(lambda _: None, ends.append)
        assert handle._directory is not None
        directory = Path(handle._directory)
        assert directory.exists()
        handle.send(b"before")
        handle.kill()
        await asyncio.wait_for(handle.exit, 20)
        handle.send(b"after")
        await asyncio.sleep(0)
        return directory

    assert not asyncio.run(killed()).exists()
    assert ends == [-9]
