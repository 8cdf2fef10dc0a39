"""Replicas behind one server: same prefix, same replica, unless that has too much to do; one that
dies takes only its own requests along."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servers import Served, serving
from trueline import LLM, SamplingParams
from trueline.config import NOT_DIVIDED, EngineConfig
from trueline.engine.messages import CoreRequest
from trueline.errors import UsageError
from trueline.server.process.client import EngineClient
from trueline.server.process.load_balancer import FACTOR, MOST_BLOCKS, SLACK, LoadBalancer
from trueline.server.process.messages import Abort, Add, Ready, ToEngine
from trueline.server.process.replicas import Replicas, replica_configs
from trueline.server.process.streams import EngineDead
from wire import Wire, request

Tiny = Callable[..., Path]
BLOCK = 4
PATIENCE = 30.0


def prompt(first: int, blocks: int = 5) -> list[int]:
    return [first + i % 7 for i in range(blocks * BLOCK)]


# -- the rule ------------------------------------------------------------------------------


def test_a_prefix_goes_where_it_was_computed() -> None:
    balancer = LoadBalancer(3, BLOCK)
    homes = {first: balancer.choose(prompt(first), None, [0, 0, 0]) for first in range(0, 120, 20)}
    assert sorted(homes.values()) == [0, 0, 1, 1, 2, 2]
    for first, home in homes.items():
        longer = [*prompt(first), 900, 901, 902]
        assert balancer.choose(longer, None, [3, 3, 3]) == home
        assert balancer.choose([*longer, 903, 904, 905, 906], None, [3, 3, 3]) == home


def test_the_longest_prefix_decides() -> None:
    balancer = LoadBalancer(2, BLOCK)
    one = balancer.choose([*prompt(0), *prompt(50)], None, [0, 0])
    other = balancer.choose([*prompt(0), *prompt(60)], None, [20, 0] if one == 0 else [0, 20])
    assert {one, other} == {0, 1}
    for _ in range(3):
        assert balancer.choose([*prompt(0), *prompt(50), 9], None, [0, 0]) == one
        assert balancer.choose([*prompt(0), *prompt(60), 9], None, [0, 0]) == other


def test_a_salt_is_part_of_the_prefix() -> None:
    balancer = LoadBalancer(4, BLOCK)
    salts = [None, "a", "b", ""]
    homes = [balancer.choose(prompt(0), salt, [0] * 4) for salt in salts]
    assert sorted(map(str, homes)) == ["0", "1", "2", "3"]
    assert [balancer.choose(prompt(0), salt, [0] * 4) for salt in salts] == homes


def test_no_replica_gets_more_than_its_share_for_a_prefix() -> None:
    """All ask for the same, and none has finished."""
    balancer, loads = LoadBalancer(4, BLOCK), [0, 0, 0, 0]
    for _ in range(400):
        chosen = balancer.choose(prompt(0), None, list(loads))
        assert chosen is not None
        loads[chosen] += 1
        assert max(loads) <= FACTOR * sum(loads) / 4 + SLACK + 1
    assert min(loads) > 0.6 * 400 / 4


def test_few_requests_stay_with_their_prefix() -> None:
    balancer = LoadBalancer(2, BLOCK)
    home = balancer.choose(prompt(0), None, [0, 0])
    assert home == 0
    for load in range(SLACK):
        assert balancer.choose(prompt(0), None, [load, 0]) == home


def test_short_prompts_go_to_the_least_loaded() -> None:
    balancer, loads = LoadBalancer(3, BLOCK), [5, 0, 2]
    for _ in range(8):
        chosen = balancer.choose([1, 2, 3], None, list(loads))
        assert chosen is not None
        loads[chosen] += 1
    assert loads == [5, 5, 5]


def test_a_replica_that_takes_no_requests_gets_none() -> None:
    balancer = LoadBalancer(2, BLOCK)
    home = balancer.choose(prompt(0), None, [0, 0])
    assert home == 0
    assert balancer.choose(prompt(0), None, [None, 90]) == 1
    assert balancer.choose(prompt(0), None, [None, None]) is None
    assert balancer.choose(prompt(0), None, [0, 0]) == 1, "where it was computed last"


def test_long_prompts_cost_no_more_than_their_first_blocks(monkeypatch: Any) -> None:
    monkeypatch.setattr("trueline.server.process.load_balancer.MOST_PREFIXES", 300)
    balancer = LoadBalancer(2, BLOCK)
    home = balancer.choose([5] * 100_000, None, [0, 0])
    assert len(balancer._replica_of) == MOST_BLOCKS
    for first in range(0, 4000, 100):
        balancer.choose(prompt(first, 20), None, [0, 0])
    assert len(balancer._replica_of) == 300
    assert home == 0


class Idle(EngineClient):
    """Takes requests, and never finishes them."""

    def __init__(self) -> None:
        super().__init__(Path(), EngineConfig())
        self.state = "ready"
        self.ready = Ready(
            plan_lines=[], startup_seconds={}, family="", vocab_size=9, eos_token_ids=[],
            max_model_len=99, max_num_seqs=8, max_logprobs=1, num_blocks=9, block_size=BLOCK,
            num_state_slots=None, memory_bytes={},
        )  # fmt: skip

        self.sent: list[ToEngine] = []

    def _send(self, message: ToEngine) -> None:
        self.sent.append(message)


def test_a_lost_replica_ends_a_request_that_others_share() -> None:
    async def lose_one() -> None:
        lost, other = Idle(), Idle()
        replicas = Replicas([lost, other])
        asked = [
            CoreRequest(request_id=str(i), prompt_token_ids=prompt(20 * i), params=SamplingParams())
            for i in range(4)
        ]
        stream = replicas.generate(asked)
        assert (lost.num_open, other.num_open) == (2, 2)
        lost._started = asyncio.get_running_loop().create_future()
        lost._started.set_result(lost.ready)
        lost._ended(-signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGKILL"):
            await anext(stream)
        stream.abort()
        assert other.sent[1:] == [Abort(["1", "3"])], "they would run for nobody"
        assert (replicas.state, lost.state, replicas.max_num_seqs) == ("ready", "dead", 8)
        replicas.generate(asked[:1])
        assert isinstance(other.sent[-1], Add)

    asyncio.run(lose_one())


def test_a_batch_is_placed_as_if_it_came_one_by_one() -> None:
    async def add(together: bool) -> list[int]:
        replicas = Replicas([Idle(), Idle(), Idle()])
        requests = [
            CoreRequest(request_id=str(i), prompt_token_ids=prompt(0), params=SamplingParams())
            for i in range(60)
        ]
        for each in [requests] if together else [[one] for one in requests]:
            replicas.generate(each)
        assert (replicas.num_open, replicas.max_num_seqs) == (60, 24)
        return [client.num_open for client in replicas.clients]

    together, alone = (asyncio.run(add(together)) for together in (True, False))
    assert together == alone
    assert min(together) > 10


# -- options -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOT_DIVIDED)
def test_other_ways_to_divide_a_model_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} = 2: accepted: 1; .* use "):
        EngineConfig(**{name: 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size = 0: accepted: a whole number from 1 up"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "data_parallel_rank = 2: accepted: 0"),
        ({"data_parallel_rank": 1}, "data_parallel_rank = 1: accepted: 0 to 0"),
        ({"data_parallel_size": 2, "nnodes": 2, "tensor_parallel_size": 2}, "load balancer"),
        ({"data_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "replica"),
    ],
)
def test_replicas_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        EngineConfig(**options)


def test_one_engine_is_one_replica(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match=r"data_parallel_size = 2: one engine .*trueline serve"):
        LLM(tiny("deepseek_v3"), data_parallel_size=2)
    llm = LLM(tiny("deepseek_v3"), data_parallel_size=2, data_parallel_rank=1, device="cpu")
    whole = LLM(tiny("deepseek_v3"), device="cpu")
    plan, alone = llm.llm_engine.plan, whole.llm_engine.plan
    assert plan.threads == max(alone.threads // 2, 1)


def test_a_server_starts_all_replicas_or_the_one_asked_for() -> None:
    assert [each.data_parallel_rank for each in replica_configs(EngineConfig())] == [None]
    three = EngineConfig(data_parallel_size=3)
    assert [each.data_parallel_rank for each in replica_configs(three)] == [0, 1, 2]
    last = EngineConfig(data_parallel_size=3, data_parallel_rank=2)
    assert replica_configs(last) == [last]


def test_replicas_do_not_share_gpus() -> None:
    from trueline.engine.ranks.join import first_gpu

    config = EngineConfig(data_parallel_size=3, data_parallel_rank=2, tensor_parallel_size=2)
    assert first_gpu(config, 6) == 4
    assert first_gpu(EngineConfig(tensor_parallel_size=2), 1) == 0
    with pytest.raises(UsageError, match="these need 6 GPUs, PyTorch sees 5"):
        first_gpu(config, 5)


# -- a server with two ---------------------------------------------------------------------


def by_replica(served: Served, name: str) -> list[float]:
    found = re.findall(
        rf'^trueline:{name}(?:_total)?{{engine="(\d)",.*}} (\S+)$',
        served.get("/metrics").text,
        re.M,
    )
    return [float(value) for _, value in sorted(found)]


def engine_pids(served: Served) -> list[int]:
    """In the order of the replicas: they are started one after the other."""
    parent = served.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return sorted(pid for pid, command in commands.items() if "process.engine_process" in command)


def complete(served: Served, ids: Any, **more: Any) -> dict[str, Any]:
    asked = {"prompt": ids, "temperature": 0, "max_tokens": 4, "return_token_ids": True} | more
    answer = served.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def begun(served: Served, ids: list[int]) -> Wire:
    asked = {"prompt": ids, "temperature": 0, "max_tokens": 400, "ignore_eos": True,
             "stream": True}  # fmt: skip
    connection = Wire(served.url)
    connection.send(request("POST", "/v1/completions", json.dumps(asked).encode(), {}))
    while b"data: " not in connection.rest:
        assert connection._more()
    return connection


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def check_prefixes(served: Served) -> None:
    for first in (10, 30, 50, 70):
        complete(served, prompt(first))
    each = by_replica(served, "prompt_tokens")
    assert each[0] == each[1] == 2 * len(prompt(0)), "two prefixes each"
    for first in (10, 30, 50, 70):
        assert cached(complete(served, [*prompt(first), 3, 4, 5])) > 0, "another replica got it"


def check_a_batch_is_spread(served: Served) -> None:
    before = by_replica(served, "prompt_tokens")
    prompts = [prompt(first, 2) for first in range(80, 88)]
    answer = complete(served, prompts)
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    alone = [complete(served, ids)["choices"][0]["token_ids"] for ids in prompts]
    assert [choice["token_ids"] for choice in answer["choices"]] == alone
    given = [
        now - then for now, then in zip(by_replica(served, "prompt_tokens"), before, strict=True)
    ]
    assert all(given), "one got nothing"
    told = by_replica(served, "request_prompt_tokens_sum")
    assert told == by_replica(served, "prompt_tokens"), "each under the replica that it went to"


def check_only_its_own_requests_fail(served: Served, meanwhile: Callable[[], None]) -> None:
    """A stream on each replica; replica 0 is killed."""
    lost, other = (begun(served, prompt(first)) for first in (10, 30))
    os.kill(engine_pids(served)[0], signal.SIGKILL)
    body = lost.answer().body
    assert b"engine_dead" in body
    assert b"[DONE]" not in body
    meanwhile()
    body = other.answer().body
    assert b"engine_dead" not in body
    assert b"[DONE]" in body
    for stream in (lost, other):
        stream.close()


FLAGS = ("--data-parallel-size", "2", "--block-size", str(BLOCK), "--device", "cpu",
         "--batch-invariant", "--max-model-len", "4096")  # fmt: skip


def replicas(served: Served) -> list[str]:
    health = served.get("/health")
    assert health.status_code == 200
    return [each["status"] for each in health.json()["replicas"]]


def test_one_of_two_replicas_dies(tiny: Tiny) -> None:
    with serving(tiny("deepseek_v3"), *FLAGS) as served:
        check_prefixes(served)
        check_a_batch_is_spread(served)
        assert (replicas(served), by_replica(served, "engine_up")) == (["ready"] * 2, [1, 1])

        def one_is_lost() -> None:
            assert "killed by SIGKILL" in served.wait_for("replica lost")
            assert replicas(served) == ["dead", "ready"]
            assert by_replica(served, "engine_up") == [0, 1]

        check_only_its_own_requests_fail(served, one_is_lost)
        for first in (10, 30):
            complete(served, prompt(first))
        os.kill(engine_pids(served)[0], signal.SIGKILL)
        assert served.ended() == 1, "none is left"
        assert "engine lost" in served.rest_of_log()


def one_is_loading(served: Served) -> None:
    assert replicas(served) == ["loading", "ready"]
    assert by_replica(served, "engine_up") == [0, 1]


@pytest.mark.slow
def test_a_replica_is_started_again_while_the_other_serves(tiny: Tiny) -> None:
    with serving(tiny("bailing_moe_v2_5"), *FLAGS, "--on-engine-death", "restart") as served:
        right = [complete(served, prompt(first))["choices"] for first in (10, 30)]
        check_only_its_own_requests_fail(served, lambda: one_is_loading(served))
        again = [complete(served, prompt(first))["choices"] for first in (10, 30)]
        assert [c["token_ids"] for (c,) in again] == [c["token_ids"] for (c,) in right]
        eventually(lambda: replicas(served) == ["ready", "ready"])
        for first in (90, 110):
            complete(served, prompt(first))
        assert by_replica(served, "prompt_tokens")[0] > 0, "it got no requests"


@pytest.mark.slow
def test_replicas_of_several_ranks(tiny: Tiny) -> None:
    keys = {"num_attention_heads": 8, "hidden_size": 80, "n_routed_experts": 16,
            "intermediate_size": 96, "moe_intermediate_size": 24}  # fmt: skip
    model = tiny("deepseek_v3", keys=keys)
    prompts = [prompt(first) for first in (10, 30, 50)]
    llm = LLM(model, device="cpu", batch_invariant=True, max_model_len=4096)
    greedy = SamplingParams(temperature=0, max_tokens=4)
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    right = [r.outputs[0].token_ids for r in llm.generate(asked, greedy, use_tqdm=False)]
    with serving(model, *FLAGS, "--tensor-parallel-size", "2") as served:
        found = [complete(served, ids)["choices"][0]["token_ids"] for ids in prompts]
        assert found == right
        assert all(by_replica(served, "prompt_tokens"))
        served.signal(signal.SIGTERM)
        assert served.ended() == 0


def test_a_replica_that_cannot_start_ends_the_server(tiny: Tiny) -> None:
    with serving(tiny("deepseek_v3"), *FLAGS, "--op", "linear=nobody", wait=False) as served:
        assert served.ended() == 2
        log = served.rest_of_log()
    assert "nobody" in log
    assert "Traceback" not in log
