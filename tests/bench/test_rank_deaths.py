"""`trueline bench processes --deaths`: its sums, what counts as left, and all of it on a tiny
model."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from trueline.bench.rank_deaths import Death, summarise
from trueline.cli import main
from trueline.utils.environment import listening_sockets, open_sockets, shared_memory


def test_all_clients_of_all_rounds_count() -> None:
    rounds = [Death([0.1, 0.2], 1.0, []), Death([0.3, 0.9], 3.0, ["socket 7"])]
    assert summarise("killed", rounds) == {
        "what": "killed", "clients": 4, "heard_s": 0.25, "heard_worst_s": 0.9, "gone_s": 2.0,
        "gone_worst_s": 3.0, "left": ["socket 7"],
    }  # fmt: skip


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_socket_that_listens_is_seen_until_it_is_closed(family: int) -> None:
    with socket.socket(family) as one:
        (inode,) = {str(os.fstat(one.fileno()).st_ino)} & open_sockets(os.getpid())
        assert inode not in listening_sockets()
        one.listen()
        assert inode in listening_sockets()
    assert inode not in listening_sockets()


def test_shared_memory_is_seen() -> None:
    name = f"trueline-test-{os.getpid()}"
    Path("/dev/shm", name).touch()
    assert name in shared_memory()
    Path("/dev/shm", name).unlink()
    assert name not in shared_memory()


def test_too_few_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "processes", "--deaths", "--tensor-parallel-size", "1"])
    assert ended.value.code == 2
    assert "--deaths takes 2 ranks or more" in capsys.readouterr().err


@pytest.mark.slow
def test_deaths(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"intermediate_size": 96, "moe_intermediate_size": 24, "max_position_embeddings": 16384}
    model = tiny("deepseek_v3", keys=keys)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "processes", str(model), "--deaths", "--rounds", "1", "--streams", "3",
              "--json"])  # fmt: skip
    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["what"].split(",")[0] for row in rows] == [
        "killed in a step", "killed while idle", "stopped in a step",
    ]  # fmt: skip
    for row in rows:
        assert row["clients"] == 3
        assert 0 < row["heard_s"] <= row["heard_worst_s"] < row["gone_worst_s"]
        assert row["left"] == []
    assert rows[-1]["heard_s"] > 5.0  # engine_timeout
