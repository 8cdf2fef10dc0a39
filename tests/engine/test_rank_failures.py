"""Ranks that fail: while idle, stopped, missing, or not the same as rank 0. Each is named, nobody
waits for it, and nothing is left of the engine."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from trueline.config import EngineConfig
from trueline.engine.core import EngineCore
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreRequest
from trueline.engine.params import SamplingParams
from trueline.engine.ranks.executor import RanksExecutor
from trueline.engine.ranks.join import run_node
from trueline.errors import EngineBroken, UsageError
from trueline.parallel.collective import RowParallel
from trueline.parallel.group import RankFailed
from trueline.server.process.engine_process import EngineLoop, Socket
from trueline.weights.load import StoredWeights

CONFIG = EngineConfig(
    device="cpu", dtype="float32", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=24,
    block_size=4, num_gpu_blocks_override=40, tensor_parallel_size=2, init_timeout=50.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("deepseek_v3", keys={"intermediate_size": 96, "moe_intermediate_size": 24})


def ranks_of(core: EngineCore) -> RanksExecutor:
    assert isinstance(core.executor, RanksExecutor)
    return core.executor


def ask(core: EngineCore, name: str, max_tokens: int = 6) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    core.add(CoreRequest(request_id=name, prompt_token_ids=[5, 9, 7], params=params))


def tokens(core: EngineCore) -> list[int]:
    found = []
    while core.has_unfinished():
        for output in core.step():
            assert output.error is None, output.error
            found += output.token_ids
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> set[str]:
    found: set[str] = set()
    for each in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # of a thread that has just ended
            found.update(each.read_text().split())
    return found


def sockets() -> set[str]:
    """Also those that listen."""
    descriptors = Path("/proc/self/fd")
    return {link for each in descriptors.iterdir() if (link := _target(each)).startswith("socket:")}


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # of the listing itself
        return ""


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (own := tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    monkeypatch.setenv("TMPDIR", str(own))
    return own


@contextmanager
def nothing_left() -> Iterator[None]:
    def found() -> tuple[set[str], ...]:
        threads = {each.name for each in threading.enumerate()}
        shared = {each.name for each in Path("/dev/shm").glob("torch_*")}
        files = {each.name for each in Path(tempfile.gettempdir()).iterdir()}
        return children(), sockets(), threads, shared, files

    before = found()
    yield
    for _ in range(100):  # a thread that is about to end
        left = [now - was for was, now in zip(before, found(), strict=True)]
        if not any(left):
            return
        time.sleep(0.02)
    raise AssertionError(f"left: {left}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- while an engine is loaded -------------------------------------------------------------


def test_a_rank_that_dies_while_nothing_runs_wakes_the_server(model: Path, tmp_path: Path) -> None:
    context = zmq.Context()
    parent = context.socket(zmq.PAIR)
    parent.bind(address := f"ipc://{tmp_path}/engine")
    with nothing_left():
        core = load_engine(model, CONFIG).core
        executor = ranks_of(core)
        channel = Socket(address)
        channel.wake_on(executor.alarm)
        core.check()
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(EngineLoop(core, channel).handle_messages)
            os.kill(executor.processes.pids()[1], signal.SIGKILL)
            with pytest.raises(EngineBroken, match="rank 1 was killed by SIGKILL"):
                waits.result(30)
        with pytest.raises(EngineBroken, match="rank 1 was killed by SIGKILL"):
            core.check()
        channel.close()
        core.close()
    context.destroy(linger=0)


def stop_in_a_step(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1, once it has taken the step's message: rank 0 computes."""
    run = RowParallel.run

    def stopped(self: RowParallel, *given: Any) -> torch.Tensor:
        os.kill(pid, signal.SIGSTOP)
        return run(self, *given)

    monkeypatch.setattr(RowParallel, "run", stopped)


def check_named(words: str) -> None:
    """It, and the collective others wait in. Once it came there, only its silence shows."""
    assert "no step ended within 1 s (engine_timeout): " in words
    where = r"(rank 1 did not|all ranks have) come to exchange \d+ \(all_reduce of float32 \[3, "
    assert re.search(where, words), words
    assert "; silent (stopped, or on a machine that is not reached): rank 1" in words


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_stops_is_named_after_engine_timeout(
    model: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_left():
        core = load_engine(model, replace(CONFIG, engine_timeout=1.0, overlap=overlap)).core
        pid = ranks_of(core).processes.pids()[1]
        stop_in_a_step(pid, monkeypatch)
        ask(core, "first")
        with pytest.raises(EngineBroken) as caught:
            tokens(core)
        check_named(str(caught.value))
        core.close()
        assert not is_alive(pid)


def test_collectives_that_differ_are_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 makes one more than the other. Right ones compute the same as unchecked."""
    with nothing_left():
        core = load_engine(model, replace(CONFIG, debug_collectives=True, overlap=True)).core
        one = load_engine(model, replace(CONFIG, tensor_parallel_size=1)).core
        for each in (core, one):
            ask(each, "right")
        assert tokens(core) == tokens(one)
        one.close()
        run = RowParallel.run

        def twice(self: RowParallel, x: torch.Tensor, *given: Any) -> torch.Tensor:
            self.collective.from_first(x)
            return run(self, x, *given)

        monkeypatch.setattr(RowParallel, "run", twice)
        ask(core, "wrong")
        with pytest.raises(EngineBroken, match=r"collectives differ: rank 0: broadcast .* rank 1"):
            tokens(core)
        core.close()


# -- before one is -------------------------------------------------------------------------


def two_machines(port: int, **options: object) -> tuple[EngineConfig, EngineConfig]:
    first = replace(CONFIG, nnodes=2, master_port=port, **options)  # type: ignore[arg-type]
    return first, replace(first, node_rank=1)


def test_a_machine_that_does_not_come(model: Path) -> None:
    first, _ = two_machines(free_port(), init_timeout=0.3)
    with nothing_left(), pytest.raises(RankFailed) as caught:
        load_engine(model, first)
    assert str(caught.value) == "rank 1 of 2 did not come within 0.3 s (init_timeout); here: 0"


def test_a_port_in_use(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with nothing_left(), pytest.raises(UsageError, match=f"master_port = {port}: rank 0 cann"):
            load_engine(model, two_machines(port)[0])


def test_a_machine_that_finds_no_first_one(model: Path) -> None:
    _, second = two_machines(free_port(), init_timeout=1.0)
    with nothing_left():
        assert run_node(model, second) == 1


def refused(model: Path, config: EngineConfig, there: Path, other: EngineConfig) -> str:
    """What rank 0 says when the second machine runs something else, which ends there too."""
    with nothing_left(), ThreadPoolExecutor(1) as pool:
        node = pool.submit(run_node, there, other)
        with pytest.raises(RankFailed) as caught:
            load_engine(model, config).core.close()
        assert node.result(30) == 1
        return str(caught.value)


def test_machines_with_other_options(model: Path) -> None:
    first, second = two_machines(free_port())
    words = refused(model, first, model, replace(second, max_model_len=80))
    assert words.startswith("rank 1: rank 1 and rank 0 differ in the engine's options: ")
    assert "'max_model_len': 80" in words
    assert "'max_model_len': 96" in words


@pytest.mark.slow
def test_machines_with_other_checkpoints(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    file = next(copy.glob("*.safetensors"))
    file.write_bytes(file.read_bytes() + b"\0")
    first, second = two_machines(free_port())
    words = refused(model, first, copy, second)
    assert "rank 1 and rank 0 differ in the checkpoint's files: " in words


def test_a_checkpoint_that_is_damaged_on_one_machine(model: Path, tmp_path: Path) -> None:
    """Its words reach rank 0."""
    copy = shutil.copytree(model, tmp_path / "copy")
    file = next(copy.glob("*.safetensors"))
    stored = file.read_bytes()
    file.write_bytes(bytes(8) + stored[8:])
    first, second = two_machines(free_port())
    words = refused(model, first, copy, second)
    assert words.startswith("rank 1: ")
    assert file.name in words


# -- on another machine --------------------------------------------------------------------


@contextmanager
def joined(model: Path, **options: object) -> Iterator[tuple[EngineCore, int]]:
    """An engine on two machines, and the process of its second rank, which is no child of rank
    0's RankProcesses. That machine ends with an error."""
    first, second = two_machines(free_port(), **options)
    with nothing_left(), ThreadPoolExecutor(1) as pool:
        before = children()
        node = pool.submit(run_node, model, second)
        core = load_engine(model, first).core
        assert not ranks_of(core).processes.pids()
        (pid,) = map(int, children() - before)
        try:
            yield core, pid
            assert node.result(30) == 1
            assert not is_alive(pid)
        finally:
            core.close()


def test_a_rank_of_another_machine_that_dies_while_nothing_runs(model: Path) -> None:
    with joined(model) as (core, pid):
        os.kill(pid, signal.SIGKILL)
        readable, _, _ = select.select([ranks_of(core).alarm], [], [], 30)
        assert readable
        with pytest.raises(EngineBroken, match="rank 1: was killed by SIGKILL"):
            core.check()


@pytest.mark.slow
def test_a_rank_of_another_machine_that_stops(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here can kill it; who waits for it is woken, and its machine ends it."""
    with joined(model, engine_timeout=1.0) as (core, pid):
        stop_in_a_step(pid, monkeypatch)
        ask(core, "first")
        with pytest.raises(EngineBroken) as caught:
            tokens(core)
        check_named(str(caught.value))


@pytest.mark.slow
def test_a_rank_that_dies_during_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads its weights, and would go on doing so for minutes."""
    pids = []

    def killed_before(self: StoredWeights, *given: object, **named: object) -> None:
        (pid,) = map(int, children())
        pids.append(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        init(self, *given, **named)  # type: ignore[arg-type]

    init = StoredWeights.__init__
    monkeypatch.setattr(StoredWeights, "__init__", killed_before)
    with nothing_left(), pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        load_engine(model, CONFIG)
    assert len(pids) == 1


MACHINES = """
ip link set lo up
unshare -n sleep 100 & there=$!
trap 'kill $there' EXIT
while [ $(readlink /proc/$there/ns/net) = $(readlink /proc/self/ns/net) ]; do sleep 0.01; done
ip link add first type veth peer name second
ip link set second netns $there
ip addr add 10.77.0.1/24 dev first
ip link set first up
nsenter -t $there -n ip link set lo up
nsenter -t $there -n ip addr add 10.77.0.2/24 dev second
nsenter -t $there -n ip link set second up
nsenter -t $there -n "$PYTHON" -m trueline serve "$MODEL" $FLAGS --node-rank 1 & node=$!
"$PYTHON" -c "$PROGRAM"
wait $node
"""
PROGRAM = """
from trueline import LLM, SamplingParams
llm = LLM(MODEL, max_model_len=96, num_gpu_blocks_override=40, **OPTIONS)
params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
(found,) = llm.generate([{"prompt_token_ids": [5, 9, 7]}], params, use_tqdm=False)
print(found.outputs[0].token_ids)
"""


def test_two_machines_give_the_tokens_of_one(model: Path) -> None:
    """Two network namespaces, joined by a virtual cable."""
    if subprocess.run(["unshare", "-rn", "ip", "link", "show"], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    options = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "10.77.0.1"}
    flags = "--tensor-parallel-size 2 --nnodes 2 --master-addr 10.77.0.1 --max-model-len 96 " \
            "--num-gpu-blocks-override 40"  # fmt: skip
    program = PROGRAM.replace("MODEL", repr(str(model))).replace("OPTIONS", repr(options))
    settings = {"PYTHON": sys.executable, "MODEL": str(model), "FLAGS": flags, "PROGRAM": program}
    done = subprocess.run(
        ["unshare", "-rn", "bash", "-ec", MACHINES],
        env=os.environ | settings, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one = load_engine(model, replace(CONFIG, tensor_parallel_size=1)).core
    ask(one, "one", 12)
    assert done.stdout.strip() == str(tokens(one))
    one.close()
