"""Ranks as Ray actors: the bits of one rank, on one node and on two; one that is lost is named, and
nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servers import serving
from trueline.config import EngineConfig
from trueline.engine.core import EngineCore
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreOutput, CoreRequest
from trueline.engine.params import SamplingParams
from trueline.engine.ranks.executor import RanksExecutor
from trueline.engine.ranks.ray_actors import RayCluster, import_ray
from trueline.errors import EngineBroken, UsageError

BASE = EngineConfig(
    device="cpu", dtype="float32", batch_invariant=True, max_logprobs=-1, max_model_len=96,
    max_num_seqs=4, max_num_batched_tokens=24, block_size=4, num_gpu_blocks_override=20,
)  # fmt: skip
RAY = replace(BASE, tensor_parallel_size=2, distributed_executor_backend="ray", init_timeout=60.0)
ALL = SamplingParams(max_tokens=6, temperature=0.0, logprobs=-1, prompt_logprobs=-1)
PATIENCE = 20.0


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    keys = {"num_attention_heads": 8, "hidden_size": 80, "n_routed_experts": 16,
            "intermediate_size": 96, "moe_intermediate_size": 24}  # fmt: skip
    return tiny("deepseek_v3", keys=keys)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing runs before, and nothing after."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'trueline[ray]'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not ray.is_initialized()
    return ray


@pytest.fixture
def nodes(ray: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one CPU each, that know each other by TCP only."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def ask(core: EngineCore, name: str, length: int) -> None:
    ids = [(7 * i + 3 * length) % 90 + 5 for i in range(length)]
    core.add(CoreRequest(request_id=name, prompt_token_ids=ids, params=ALL))


def answers(core: EngineCore) -> dict[str, list[CoreOutput]]:
    outputs: dict[str, list[CoreOutput]] = {}
    for number, length in enumerate((31, 5, 17, 40)):
        ask(core, f"{number}", length)
    while core.has_unfinished():
        for output in core.step():
            output.first_scheduled = None
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def one_rank(model: Path) -> dict[str, list[CoreOutput]]:
    core = load_engine(model, BASE).core
    found = answers(core)
    core.close()
    return found


def actor_pid(core: EngineCore) -> int:
    executor = core.executor
    assert isinstance(executor, RanksExecutor)
    return executor.processes.pids()[1]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> set[str]:
    pid = os.getpid()
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {each for each in found if is_alive(int(each))}


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


@pytest.mark.slow
def test_actors_give_the_bits_of_one_rank_and_leave_nothing(ray: Any, model: Path) -> None:
    before = children()
    loaded = load_engine(model, RAY)
    pid = actor_pid(loaded.core)
    assert answers(loaded.core) == one_rank(model)
    assert [row[0] for row in loaded.ranks] == ["rank", "0", "1"]
    loaded.core.close()
    assert not ray.is_initialized()
    eventually(lambda: not is_alive(pid) and children() <= before)


@pytest.mark.slow
def test_two_nodes_give_the_bits_of_one_rank(ray: Any, nodes: Any, model: Path) -> None:
    core = load_engine(model, RAY).core
    assert ray.available_resources().get("CPU", 0) == 0, "a rank has one CPU of each node"
    assert answers(core) == one_rank(model)
    pid = actor_pid(core)
    core.close()
    eventually(lambda: not is_alive(pid))
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_killed_actor_is_named(ray: Any, model: Path) -> None:
    before = children()
    core = load_engine(model, RAY).core
    ask(core, "first", 9)
    core.step()
    os.kill(actor_pid(core), signal.SIGKILL)
    with pytest.raises(EngineBroken, match="rank 1 was lost"):
        answers(core)
    core.close()
    assert not ray.is_initialized()
    eventually(lambda: children() <= before)


@pytest.mark.slow
def test_too_few_resources_are_told(ray: Any, nodes: Any, model: Path) -> None:
    many = replace(RAY, tensor_parallel_size=4, init_timeout=1.0)
    words = r"Ray did not place 4 ranks within 1 s .* 4 × 1 CPU.* cluster has 2 CPU, of which 2 are"
    with pytest.raises(EngineBroken, match=words):
        load_engine(model, many)
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_program_keeps_its_own_ray(ray: Any, model: Path) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        core = load_engine(model, RAY).core
        pid = actor_pid(core)
        core.close()
        assert ray.is_initialized()
        eventually(lambda: not is_alive(pid))
        eventually(lambda: ray.available_resources().get("CPU") == 2.0)
    finally:
        ray.shutdown()


def descendants(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, found) for each in (child, *descendants(child))]


AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_with_actors_leaves_nothing(ray: Any, model: Path, end: signal.Signals) -> None:
    flags = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", "--device",
             "cpu")  # fmt: skip
    with serving(model, *flags) as served:
        asked = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 4}
        os.kill(served.engine_pid(), signal.SIGTERM)  # the front end decides
        assert served.post("/v1/completions", json=asked).status_code == 200
        started = descendants(served.process.pid)
        if end == signal.SIGKILL:  # then Ray's own agents take a minute to give up
            started = [pid for pid in started if not command(pid).startswith(AGENTS)]
        assert len(started) > 3
        served.signal(end)
        assert served.ended() == (0 if end == signal.SIGTERM else -signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, started)))


class NoCluster:
    def is_initialized(self) -> bool:
        return False

    def init(self, address: str | None, **options: Any) -> None:
        assert address == "auto", "each replica would start a cluster of its own"
        raise ConnectionError("could not find any running Ray instance")


def test_replicas_need_one_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueline.engine.ranks.ray_actors.import_ray", NoCluster)
    with pytest.raises(UsageError, match=r"no cluster was found.*`ray start --head`"):
        RayCluster(replace(RAY, data_parallel_size=2, data_parallel_rank=0))


def test_without_ray_the_extra_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"ray.*not installed: pip install 'trueline\[ray\]'"):
        import_ray()
    with pytest.raises(UsageError, match=r"trueline\[ray\]"):
        load_engine(model, RAY)
