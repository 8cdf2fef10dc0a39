"""However a request ends, the engine hears of it: no step more than those under way is made for it,
and what it held is free."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inside import Inside
from trueline import LLM, SamplingParams

Tiny = Callable[..., Path]
MOST_STEPS = 2
"""After an end: one that was under way, and one that clears up."""
LONG: dict[str, Any] = {
    "prompt": list(range(40, 60)), "temperature": 0, "max_tokens": 300, "ignore_eos": True,
    "return_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module", params=["deepseek_v3", "bailing_moe_v2_5"])
def inside(request: pytest.FixtureRequest, tiny: Tiny) -> Inside:
    return Inside(tiny(request.param), max_model_len=512, max_num_seqs=8, overlap=True)


@pytest.fixture(scope="module")
def plain(inside: Inside) -> tuple[str, list[int]]:
    """What is said when nothing ends it."""
    (choice,) = json.loads(inside.ask("/v1/completions", LONG | {"max_tokens": 60}).body)["choices"]
    return choice["text"], choice["token_ids"]


def check_idle(inside: Inside) -> None:
    assert inside.steps_until_idle() <= MOST_STEPS
    told = inside.engine.snapshot()
    assert (told.num_running, told.num_waiting) == (0, 0)
    assert (told.num_blocks_used, told.num_slots_used) == (0, 0)
    assert inside.engine.num_open == 0, "a seat is taken for nobody"


def first_seen(text: str, after: int) -> str:
    """A character that appears first after so many others."""
    return next(
        char for place, char in enumerate(text) if place > after and char not in text[:place]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "end", ["stop string", "stop token", "length", "one of several", "several prompts"]
)
def test_an_answer_that_ends(
    inside: Inside, plain: tuple[str, list[int]], end: str, stream: bool
) -> None:
    text, ids = plain
    stop = {"stop": [first_seen(text, 3)], "max_tokens": 80}
    token = next(token for i, token in enumerate(ids) if i > 3 and token not in ids[:i])
    asked = {
        "stop string": stop | {"max_tokens": LONG["max_tokens"]},
        "stop token": {"stop_token_ids": [token]},
        "length": {"max_tokens": 5},
        "one of several": stop | {"n": 3, "temperature": 1.0, "seed": 5},
        "several prompts": stop | {"prompt": [LONG["prompt"], [3, 1, 4]]},
    }[end]
    before = inside.engine.steps
    heard = inside.ask("/v1/completions", LONG | asked | {"stream": stream})
    assert heard.status == 200
    check_idle(inside)
    if end == "stop string":
        # a step for the prompt, one a token, and those after the end
        assert inside.engine.steps - before <= 1 + 60 + MOST_STEPS
        assert inside.engine.steps - before < LONG["max_tokens"] / 2


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_client_that_leaves(inside: Inside, after: int) -> None:
    asked = LONG | {"stream": after > 0, "n": 2, "temperature": 1.0}
    inside.ask("/v1/completions", asked, leaves_after=after)
    check_idle(inside)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(
    inside: Inside, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = inside.service.config
    monkeypatch.setattr(inside.service, "config", replace(config, request_timeout=0.0))
    heard = inside.ask("/v1/completions", LONG | {"stream": stream})
    assert heard.status == 504 or b"timeout" in heard.body
    check_idle(inside)


def test_a_request_that_is_refused(inside: Inside) -> None:
    """Nothing of it is left: neither by the server nor by the engine."""
    for asked in ({"max_tokens": 10**6}, {"prompt": [1] * 600}, {"n": 500, "temperature": 1.0}):
        assert inside.ask("/v1/completions", LONG | asked).status == 400
        check_idle(inside)


def test_offline_too(tiny: Tiny, plain: tuple[str, list[int]], inside: Inside) -> None:
    llm = LLM(inside.engine.model, max_model_len=512)
    core = llm.llm_engine.core
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True,
                            stop=[first_seen(plain[0], 3)])  # fmt: skip
    (found,) = llm.generate([{"prompt_token_ids": LONG["prompt"]}], params, use_tqdm=False)
    assert found.outputs[0].finish_reason == "stop"
    steps = core.scheduler.counters.num_steps
    assert steps <= 1 + len(found.outputs[0].token_ids) + MOST_STEPS
    assert core.pool.num_free == core.pool.num_usable
