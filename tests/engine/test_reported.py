"""Every field that a caller is told, against a computation of its own in float64, across every
internal cut, and under preemption as without it."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import trueline.cache.kinds
import trueline.engine
import trueline.layers
import trueline.ops.sampling
from trueline import LLM, SamplingParams
from trueline.cache.blocks import BlockPool
from trueline.cache.groups import BlockGroups
from trueline.cache.slots import SlotPool
from trueline.engine.batch import Batch
from trueline.engine.core import EngineCore
from trueline.engine.scheduler import Scheduler
from trueline.errors import UsageError
from trueline.llm import LLMEngine
from trueline.outputs import Logprob, RequestOutput

Tiny = Callable[..., Path]
# bits that depend on no company and no cut
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "block_size": 4,
    "max_num_seqs": 4,
    "batch_invariant": True,
    "max_logprobs": -1,
}
SHALLOW = {"num_hidden_layers": 2}


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 37 + i * i * 11 + i) % 250 for i in range(length)]


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(tiny("deepseek_v3", keys=SHALLOW), **OPTIONS)


# -- against float64 -----------------------------------------------------------------------


def watched(
    llm: LLM, ids: list[int], params: SamplingParams
) -> tuple[RequestOutput, dict[int, Tensor]]:
    """What was told, and the logits of each position."""
    logits: dict[int, Tensor] = {}

    def watch(batch: Batch, values: Tensor) -> None:
        for row in batch.rows:
            logits.update(enumerate(values[row.tokens].clone(), row.start))

    llm.llm_engine.core.executor.runner.probe = watch
    (output,) = llm.generate({"prompt_token_ids": ids}, params)
    llm.llm_engine.core.executor.runner.probe = None
    return output, logits


def check_scores(told: dict[int, Logprob] | None, x: Tensor, token: int, count: int) -> None:
    """The `count` likeliest in order, equal ones by id, then the token itself."""
    assert told is not None
    values = x.double().tolist()
    best = max(values)
    total = best + math.log(math.fsum(math.exp(value - best) for value in values))
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))
    top = order if count == -1 else order[:count]
    assert list(told) == [*top, *([] if token in top else [token])]
    for other, score in told.items():
        exact = values[other] - total
        # told in float32: half a unit of its last place, and what float64 sums may differ by
        assert abs(score.logprob - exact) <= 2**-24 * abs(exact) + 1e-12
        assert score.rank == 1 + order.index(other)
        assert score.decoded_token is not None


@pytest.mark.parametrize("count", [0, 1, 5, -1])
def test_every_field_of_logprobs(count: int, llm: LLM) -> None:
    """Hot enough that tokens outside the likeliest are drawn."""
    text = llm.get_tokenizer()
    assert text is not None
    outside = 0
    for seed in range(3):
        params = SamplingParams(
            temperature=4.0, seed=seed, logprobs=count, prompt_logprobs=count, max_tokens=6,
            ignore_eos=True,
        )  # fmt: skip
        ids = prompt(9, seed)
        output, logits = watched(llm, ids, params)
        (copy,) = output.outputs
        sequence = [*ids, *copy.token_ids]
        told = [*(output.prompt_logprobs or []), *(copy.logprobs or [])]
        assert told[0] is None
        assert len(told) == len(sequence)
        for position in range(1, len(sequence)):
            token = sequence[position]
            check_scores(told[position], logits[position - 1], token, count)
            entry = told[position] or {}
            outside += entry[token].rank > max(count, 0)
            for other, score in entry.items():
                assert score.decoded_token == text.decode([other], skip_special_tokens=False)
        own = [(entry or {})[t].logprob for entry, t in zip(told[9:], copy.token_ids, strict=True)]
        assert copy.cumulative_logprob == pytest.approx(math.fsum(own), rel=1e-12)
        assert (output.num_cached_tokens, copy.finish_reason) == (0, "length")
    assert outside > 20


def test_all_logprobs_are_refused_where_there_is_a_limit(tiny: Tiny) -> None:
    llm = LLM(tiny("deepseek_v3", keys=SHALLOW), **OPTIONS | {"max_logprobs": 20})
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(UsageError, match=f"{name} = -1.*: accepted: up to 20"):
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(**{name: -1}))


# -- across each internal cut --------------------------------------------------------------

CUTS: dict[str, int] = {
    "engine.runner.SCORED_ROWS": 3,
    "cache.kinds.index_keys.SCORES_AT_A_TIME": 64,
    "ops.sampling.cpu.NUM_LEADING": 2,
    "ops.sampling.cpu.ROWS_AT_A_TIME": 2,
    "ops.sampling.triton.MASS_CHUNK": 16,
    "ops.sampling.triton.MASK_CHUNK": 32,
}
"""How much is held or looked at at a time, and a value that cuts a small request too."""
NO_CUTS = {
    "engine.messages.UNKNOWN": "a token that is not known",
    "engine.failures.MOST_IN_A_ROW": "test_failures.py",
    "engine.graphs.FEW": "which way rows are copied; test_graphs.py",
    "engine.graphs.NOWHERE": "a place that is none",
    "engine.grammars.MOST_KEPT": "a limit; they are compiled again",
    "engine.masks._ALL": "a word of bits",
    "engine.memory.LONG": "a length that is measured",
    "engine.memory.SLACK": "memory left alone",
    "engine.params.DEFAULT_MAX_LOGPROBS": "a limit; test_params.py",
    "engine.params.INT64": "a limit",
    "engine.params.MAX_N": "a limit",
    "engine.warmup.LONG": "contexts with fewer dry steps; test_warmup.py",
    "engine.warmup.MOST_THREADS": "that compile at once",
    "ops.sampling.GOLDEN": "the noise",
    "ops.sampling.reference.WORD": "the noise",
}


def whole_numbers(package: Any) -> Iterator[str]:
    """Constants that the modules of a package write."""
    (root,) = package.__path__
    for file in Path(root).glob("*.py"):
        for line in ast.parse(file.read_text()).body:
            if isinstance(line, ast.Assign | ast.AnnAssign):
                targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                where = f"{package.__name__}.{file.stem}".removesuffix(".__init__")
                for name in filter(str.isupper, names):
                    if type(getattr(import_module(where), name)) is int:
                        yield f"{where}.{name}".removeprefix("trueline.")


def test_every_constant_is_a_cut_or_none() -> None:
    """A new one has to be put into one of the lists."""
    packages = (trueline.cache.kinds, trueline.engine, trueline.layers, trueline.ops.sampling)
    assert {name for each in packages for name in whole_numbers(each)} == {*CUTS, *NO_CUTS}


ALL_FIELDS = [
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=1, top_p=0.9, max_tokens=6, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=2.0, seed=2, top_k=40, max_tokens=6, logprobs=-1, ignore_eos=True),
    SamplingParams(temperature=3.0, seed=3, top_p=0.99, max_tokens=6, prompt_logprobs=-1),
]


def answers(llm: LLM) -> list[RequestOutput]:
    llm.llm_engine.core.pool.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt(length, length)} for length in (25, 7, 1, 40)]
    outputs = llm.generate(prompts, ALL_FIELDS)
    return [replace(output, request_id="") for output in outputs]


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize("name", [name for name in CUTS if "triton" not in name])
def test_no_field_depends_on_a_cut(
    name: str, family: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny(family, keys=SHALLOW), **OPTIONS)
    whole = answers(llm)
    monkeypatch.setattr(f"trueline.{name}", CUTS[name])
    assert answers(llm) == whole


def test_scores_of_the_gpu_do_not_depend_on_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from trueline.ops.sampling import triton

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 4
    targets = torch.tensor([0, 17, 49])
    whole = triton.score(logits, targets, 5)
    monkeypatch.setattr(triton, "MASS_CHUNK", CUTS["ops.sampling.triton.MASS_CHUNK"])
    cut = triton.score(logits, targets, 5)
    for field in ("ranks", "top_ids"):
        assert torch.equal(getattr(cut, field), getattr(whole, field))
    for field in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(getattr(cut, field), getattr(whole, field), rtol=2**-23, atol=0)


# -- preempted, and in chunks --------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tiny: Tiny) -> dict[bool, LLMEngine]:
    """Without and with states; with room for everybody."""
    ling = tiny("bailing_moe_v2_5", keys={"num_hidden_layers": 2, "layer_group_size": 2})
    return {
        False: LLMEngine(tiny("deepseek_v3", keys=SHALLOW), **OPTIONS),
        True: LLMEngine(ling, **OPTIONS | {"num_state_slots": 12}),
    }


def narrow(core: EngineCore, blocks: int, budget: int, caching: bool, lag: int) -> None:
    """A new scheduler over a part of the cache."""
    core.blocks = BlockGroups([BlockPool(blocks, core.pool.block_size, caching)])
    core.pool = core.blocks.main
    core.slots = SlotPool(core.slots.num_slots) if core.slots else None
    limits = replace(core.scheduler.config, max_num_batched_tokens=budget)
    core.scheduler = Scheduler(limits, core.blocks, core.slots)
    core.lag = lag
    core.ended.clear()
    core.executor.runner.sampling_states.clear()  # names begin anew


def run(engine: LLMEngine, asked: list[tuple[int, list[int], SamplingParams]]) -> dict[str, Any]:
    """Who arrives when; what each was told."""
    done: dict[str, RequestOutput] = {}
    step = 0
    while len(done) < len(asked):
        for i, (arrives, ids, params) in enumerate(asked):
            if arrives == step:
                engine.add_request(f"r{i}", {"prompt_token_ids": ids}, params)
        done |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
        assert step < 2000, "it spins"
    while engine.has_unfinished_requests():
        engine.step()
    return {name: replace(output, request_id="") for name, output in done.items()}


@st.composite
def askings(draw: Any) -> list[tuple[int, list[int], SamplingParams]]:
    """Prompts that have no beginning in common: nothing is cached but what one left itself."""
    asked = []
    for i in range(draw(st.integers(2, 4))):
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.5])),
            seed=i,
            max_tokens=draw(st.sampled_from([1, 9, 16, 20])),
            logprobs=draw(st.sampled_from([None, 0, 2])),
            prompt_logprobs=draw(st.sampled_from([None, 0, 2])),
            stop_token_ids=draw(st.sampled_from([(), tuple(range(0, 311, 20))])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.4])),
        )
        asked.append((draw(st.integers(0, 2)), prompt(draw(st.integers(1, 20)), i), params))
    return asked


def test_nothing_told_depends_on_chunks_or_preemption(engines: dict[bool, LLMEngine]) -> None:
    preemptions: list[int] = []

    crowd = [
        (0, prompt(8, i), SamplingParams(temperature=0.0, seed=i, max_tokens=20)) for i in range(4)
    ]

    @settings(max_examples=max(settings.default.max_examples // 6, 1))
    @example(asked=crowd, blocks=11, budget=64, caching=True, lag=1, stateful=False)
    @example(asked=crowd, blocks=11, budget=7, caching=False, lag=0, stateful=True)
    @given(
        asked=askings(),
        blocks=st.integers(11, 13),
        budget=st.sampled_from([4, 5, 7, 16, 64]),
        caching=st.booleans(),
        lag=st.integers(0, 1),
        stateful=st.booleans(),
    )
    def check(
        asked: list[tuple[int, list[int], SamplingParams]],
        blocks: int,
        budget: int,
        caching: bool,
        lag: int,
        stateful: bool,
    ) -> None:
        engine = engines[stateful]
        core = engine.core
        narrow(core, 64, 128, caching=False, lag=0)
        alone = [run(engine, [(0, *each[1:])])["r0"] for each in asked]
        narrow(core, blocks, budget, caching, lag)
        together = run(engine, asked)
        for i, wanted in enumerate(alone):
            assert together[f"r{i}"] == wanted
        assert core.pool.num_free == core.pool.num_usable
        preemptions.append(core.scheduler.counters.num_preemptions)

    check()
    assert min(preemptions[:2]) > 0  # of the crowds
