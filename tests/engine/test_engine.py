"""The running engine: every position of every request against the float64 reference, and the same
requests under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from families import RUNNABLE
from spread import diagonal
from trueline import device, native
from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.kinds.lightning import LightningState
from trueline.cache.kinds.tails import TailsAll
from trueline.cache.kinds.window import Window
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.core import EngineCore
from trueline.engine.loading import load_engine
from trueline.errors import RequestRejected, UsageError
from trueline.layers.context import RecordedChoices
from trueline.models import read_model
from trueline.ops.capabilities import Context
from trueline.ops.registry import OPS, refusals
from trueline.plan import plan
from trueline.plan.plan import make_plan
from trueline.spec.mixer import MLASpec
from trueline.spec.shard import local_spec
from trueline.verify import engine as verify_engine
from trueline.verify import ranks
from trueline.verify.cases import FP8_32
from trueline.verify.engine import Ask, EngineRun, oracle, run, same, same_bits_under, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.ops.sampling import GATE
from trueline.verify.ranks import ranks_are_as_one, serve_on_ranks
from trueline.verify.schedules import prompt

Tiny = Callable[..., Path]
BASE = EngineConfig(max_model_len=400, max_num_seqs=8, num_gpu_blocks_override=600, block_size=16)


# A one-token prompt, one that ends at a block, one across many, one beyond YaRN's original length
# of 128; they arrive while others are under way, so that steps mix prefill and decode.
MIXED = [
    Ask(prompt(40), 10),
    Ask(prompt(1), 12, arrives=1),
    Ask(prompt(16), 9, arrives=2),
    Ask(prompt(150), 6, arrives=3),
    Ask(prompt(3), 20, arrives=3),
    Ask(prompt(1, 1), 3, arrives=9),
]


@pytest.mark.parametrize(
    ("block_size", "budget", "family"), diagonal([1, 3, 16, 64], [8, 32, 512], RUNNABLE)
)
def test_every_position_equals_the_reference(
    family: str, budget: int, block_size: int, tiny: Tiny
) -> None:
    model = tiny(family)
    done = run(model, MIXED, BASE, max_num_batched_tokens=budget, block_size=block_size)
    assert [len(tokens) for tokens in done.tokens] == [ask.max_tokens for ask in MIXED]
    oracle(model, MIXED, done)
    done.core.pool.check()


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("op", OPS)
def test_every_op_can_be_its_reference(family: str, op: str, tiny: Tiny) -> None:
    asks = [Ask(prompt(20), 3), Ask(prompt(5), 3, arrives=1)]
    done = run(tiny(family), asks, BASE, ops={op: "reference"})
    oracle(tiny(family), asks, done)
    # no layer of these models has others: see test_hybrid.py, test_sparse_engine.py
    others = (*IndexKeys.ops, *LightningState.ops, *Window.ops, *TailsAll.ops, "hyper_connections")
    if op not in others:
        assert done.core.plan.selections[op].reason == "asked for"


# What a machine without a C++ compiler runs.
NO_COMPILER = {op: names[1] for op, names in OPS.items() if names[0] == "native"}


def test_a_machine_without_a_compiler_is_served_too(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "unavailable", lambda: "no C++ compiler")
    done = run(tiny("deepseek_v3"), MIXED, BASE)
    oracle(tiny("deepseek_v3"), MIXED, done)
    chosen = done.core.plan.selections
    assert {chosen[op].name for op in NO_COMPILER if op in chosen} == {"onednn", "cpu"}
    assert chosen["mla_decode"].reason == "not native: no C++ compiler"


@pytest.mark.parametrize("family", ["deepseek_v3", "bailing_moe_v2_5", "deepseek_v32"])
def test_bfloat16_weights_are_multiplied_as_they_are(family: str, tiny: Tiny) -> None:
    """Stored small, computed in float32: as exact as a float32 model."""
    if native.unavailable():
        pytest.skip(f"no kernels here: {native.unavailable()}")
    model = tiny(family, dtype="bfloat16")
    done = run(model, MIXED, BASE)
    oracle(model, MIXED, done)
    made = done.core.plan
    assert (made.weight_dtype, made.compute_dtype) == (torch.bfloat16, torch.float32)
    assert done.core.executor.runner.decoder.embedding.dtype == torch.bfloat16


def test_float16_weights_are_planned_as_they_are_kept(tiny: Tiny) -> None:
    """No kernel multiplies by them: they take float32's memory."""
    made = load_engine(tiny("deepseek_v3", dtype="float16"), BASE).plan
    assert (made.weight_dtype, made.compute_dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "onednn"])
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("held", "flags"),
    [
        ("", "avx2 f16c"),
        ("", "avx2 avx512f avx512bw"),
        ("", "avx512f avx512_bf16"),
        ("AVX512_CORE_VNNI", "avx512f avx512_bf16"),
        ("avx2", "avx512f avx512_bf16"),
        ("AVX512_CORE_BF16", "avx512f avx512_bf16 avx512_fp16 amx_bf16"),
        ("", "avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_fp16 amx_tile"),
    ],
)
def test_16_bit_computation_is_decided_by_features(
    held: str, flags: str, storage: torch.dtype, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table alone: bfloat16 where oneDNN has instructions for it and our kernels do not run."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
        if held:
            monkeypatch.setenv(name, held)
    monkeypatch.setattr(device, "cpu_features", lambda: f"flags : fpu {flags}")
    monkeypatch.setattr(plan, "runnable", lambda *_: ["native" if ours else "onednn", "torch_mm"])
    made, reason = plan.choose_compute_dtype(storage, device.find_device("cpu"))
    has = "avx512_bf16" in flags and held.lower() not in ("avx2", "avx512_core_vnni")
    narrow = storage == torch.bfloat16 and has and not ours
    assert made == (storage if narrow else torch.float32)
    assert ("avx512_bf16" in reason) == (storage == torch.bfloat16 and has)


def test_16_bit_computation(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    if refusals("linear", "onednn", Context(dtype=torch.bfloat16)):
        pytest.skip("oneDNN has no bfloat16 GEMM here")
    monkeypatch.setattr(plan, "choose_compute_dtype", lambda storage, _: (storage, "as told"))
    made = load_engine(tiny("deepseek_v3", dtype="bfloat16"), BASE).plan
    assert (made.weight_dtype, made.compute_dtype) == (torch.bfloat16, torch.bfloat16)
    assert made.selections["linear"].name == "onednn"


def test_plain_torch_products_serve_too(tiny: Tiny) -> None:
    done = run(tiny("deepseek_v3"), MIXED, BASE, ops={"linear": "torch_mm"})
    oracle(tiny("deepseek_v3"), MIXED, done)


# -- the same requests under other schedules ---------------------------------------------


@pytest.fixture(scope="module")
def whole(tiny: Tiny) -> EngineRun:
    """Everything in one go: large budget, no cache to share."""
    return run(tiny("deepseek_v3"), MIXED, BASE, enable_prefix_caching=False)


SCHEDULES: dict[str, dict[str, Any]] = {
    "split": {"max_num_batched_tokens": 8},
    "one-token tails": {"max_num_batched_tokens": 13},
    "block of one": {"block_size": 1},
    "one seat": {"max_num_seqs": 1},
    "poison": {"poison": True, "block_size": 5},
    "poison, split": {"poison": True, "block_size": 3, "max_num_batched_tokens": 8},
    "one step ahead": {"overlap": True},
    "one step ahead, split": {"overlap": True, "max_num_batched_tokens": 8},
    "one step ahead, poison": {"overlap": True, "poison": True, "block_size": 5},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_agree(name: str, tiny: Tiny, whole: EngineRun) -> None:
    done = run(tiny("deepseek_v3"), MIXED, BASE, **SCHEDULES[name])
    same(name, done, whole)


def test_overlapped_is_bitwise_the_plain_loop(tiny: Tiny) -> None:
    asks = [replace(ask, params={"temperature": 0.9, "seed": i, "repetition_penalty": 1.2})
            for i, ask in enumerate(MIXED)]  # fmt: skip
    plain, ahead = (run(tiny("deepseek_v3"), asks, BASE, overlap=o) for o in (False, True))
    for i in range(len(asks)):
        assert plain.tokens[i] == ahead.tokens[i]


def test_alone_is_as_in_a_batch(tiny: Tiny, whole: EngineRun) -> None:
    model = tiny("deepseek_v3")
    for i, ask in enumerate(MIXED):
        alone = run(model, [replace(ask, arrives=0)], BASE)
        one = EngineRun([whole.tokens[i]], [whole.logits[i]], [0], [[]], whole.core)
        same("solo = batch", alone, one)


def test_preempted_requests_resume_as_if_nothing_was(tiny: Tiny) -> None:
    asks = [Ask(prompt(30, i), 40) for i in range(4)]
    model = tiny("deepseek_v3")
    free = run(model, asks, BASE)
    for caching in (False, True):
        tight = run(
            model, asks, BASE, num_gpu_blocks_override=18, block_size=8, max_num_batched_tokens=64,
            enable_prefix_caching=caching,
        )  # fmt: skip
        assert tight.core.scheduler.counters.num_preemptions > 0
        same("preempt and resume", tight, free)


def test_a_prefix_hit_is_as_a_cold_start(tiny: Tiny) -> None:
    shared = prompt(50, 7)
    asks = [Ask(shared, 4), Ask(shared, 6, arrives=8), Ask([*shared[:35], 5, 6, 7], 5, arrives=8)]
    model = tiny("deepseek_v3")
    cold = run(model, asks, BASE, enable_prefix_caching=False)
    warm = run(model, asks, BASE)
    assert warm.cached == [0, 48, 32]
    assert cold.cached == [0, 0, 0]
    same("prefix hit", warm, cold)
    oracle(model, asks, warm)


def test_generated_tokens_are_cached_too(tiny: Tiny) -> None:
    """A second turn hits its own first answer."""
    model = tiny("deepseek_v3")
    first = Ask(prompt(20, 3), 20)
    core = load_engine(model, BASE).core
    answer = serve(core, [first]).tokens[0]
    second = Ask([*first.prompt, *answer, 9, 8, 7], 5)
    warm = serve(core, [second])
    assert warm.cached == [32]  # 39 positions are written: two full blocks of 16
    same("second turn", warm, run(model, [second], BASE))


def test_salt_keeps_prefixes_apart(tiny: Tiny) -> None:
    core = load_engine(tiny("deepseek_v3"), BASE).core
    ask = Ask(prompt(40), 2)
    assert serve(core, [ask]).cached == [0]
    assert serve(core, [ask]).cached == [32]
    for salt in ("a", "b", ""):
        salted = replace(ask, cache_salt=salt)
        assert serve(core, [salted]).cached == [0], "somebody else's"
        assert serve(core, [salted]).cached == [32], "one's own"
    assert serve(core, [ask]).cached == [32]
    core.fingerprint = "another model"
    assert serve(core, [ask]).cached == [0]


def test_prompt_logprobs_do_not_read_the_prefix_cache(tiny: Tiny) -> None:
    model = tiny("deepseek_v3")
    core = load_engine(model, BASE).core
    ask = Ask(prompt(40), 2)
    serve(core, [ask])
    done = serve(core, [replace(ask, params={"prompt_logprobs": 2})])
    assert done.cached == [0]
    scores = [score for news in done.outputs[0] for score in news.prompt_scores]
    rows = done.logits[0]
    assert [score.token_id for score in scores] == ask.prompt[1:]
    for position, score in enumerate(scores):
        exact = rows[position].double().log_softmax(-1)
        assert score.logprob == pytest.approx(float(exact[score.token_id]), rel=GATE)
        assert len(score.top) == 2


@pytest.mark.parametrize("budget", [11, 64])
def test_preempted_prompts_are_scored_once(budget: int, tiny: Tiny) -> None:
    """Computed again in one chunk, and in several."""
    asks = [Ask(prompt(30, i), 40, params={"prompt_logprobs": 0}) for i in range(4)]
    tight = run(tiny("deepseek_v3"), asks, BASE, num_gpu_blocks_override=18, block_size=8,
                max_num_batched_tokens=budget)  # fmt: skip
    assert tight.core.scheduler.counters.num_preemptions > 0
    for ask, outputs in zip(asks, tight.outputs, strict=True):
        scores = [score.token_id for news in outputs for score in news.prompt_scores]
        assert scores == ask.prompt[1:]


def test_steady_state(tiny: Tiny) -> None:
    """The same probe after the cache has turned over more than twenty times."""
    model = tiny("deepseek_v3")
    core = load_engine(model, replace(BASE, num_gpu_blocks_override=20, block_size=8)).core
    probe = Ask(prompt(33, 5), 10)
    before = serve(core, [probe])
    written = 0
    while written < 20 * 160:
        asks = [Ask(prompt(40 + i, written + i), 10) for i in range(3)]
        serve(core, asks)
        written += sum(len(ask.prompt) + 10 for ask in asks)
    assert core.pool.num_evictions > 20
    same("steady state", serve(core, [probe]), before)
    core.pool.check()


def test_copies_are_requests_of_their_own(tiny: Tiny) -> None:
    hot = {"temperature": 1.0}
    copies = [Ask(prompt(20), 8, params=hot | {"seed": 5 + i}) for i in range(3)]
    model = tiny("deepseek_v3")
    together = run(model, copies, BASE)
    assert len({tuple(tokens) for tokens in together.tokens}) == 3
    for i, copy in enumerate(copies):
        assert run(model, [copy], BASE).tokens[0] == together.tokens[i]


# -- batch invariance ----------------------------------------------------------------------

INVARIANT = replace(BASE, batch_invariant=True)
CASES: dict[str, dict[str, Any]] = {
    "split": {"max_num_batched_tokens": 8},
    "odd chunks": {"max_num_batched_tokens": 37, "block_size": 3},
    "block of one": {"block_size": 1},
    "large blocks": {"block_size": 64},
    "one seat": {"max_num_seqs": 1},
    "preempted": {"num_gpu_blocks_override": 24, "block_size": 8, "max_num_batched_tokens": 64},
    "one step ahead": {"overlap": True},
    "poison": {"poison": True},
}


def _some(families: tuple[str, ...]) -> list[Any]:
    """All families in test-full, these also before."""
    return [
        pytest.param(family, marks=() if family in families else pytest.mark.slow)
        for family in RUNNABLE
    ]


# Sparse and hybrid families: in test_sparse_engine.py and test_hybrid.py.
DENSE = ("deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("family", _some(DENSE))
def test_bits_do_not_depend_on_the_schedule(family: str, tiny: Tiny) -> None:
    same_bits_under(tiny(family), MIXED, INVARIANT, CASES)


# Four times as long without our kernels; the ops' own checks see every one of them.
@pytest.mark.slow
@pytest.mark.parametrize("family", RUNNABLE)
def test_bits_do_not_depend_on_the_schedule_without_a_compiler(family: str, tiny: Tiny) -> None:
    same_bits_under(tiny(family), MIXED, replace(INVARIANT, ops=NO_COMPILER), CASES)


def test_bits_of_a_prefix_hit(tiny: Tiny) -> None:
    model = tiny("deepseek_v3")
    core = load_engine(model, INVARIANT).core
    ask = Ask(prompt(100), 5)
    cold = serve(core, [ask])
    warm = serve(core, [ask])
    assert warm.cached == [96]
    same("prefix hit", warm, cold, bitwise=True)


@pytest.mark.parametrize("family", ["deepseek_v3", "bailing_moe_v2_5", "glm_moe_dsa"])
def test_a_cpu_whose_sums_are_rougher_is_judged_by_its_own_noise(
    family: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it did not keep the usual gate. What is wrong stays red."""
    model = tiny(family)
    done = run(model, MIXED, BASE)
    monkeypatch.setattr(verify_engine, "ORACLE_GATE", 1e-12)
    assert 1e-7 < oracle(model, MIXED, done) <= 2e-5
    done.logits[1][3] = done.logits[1][3].index_add(
        0, torch.tensor([7]), torch.tensor([2 * verify_engine.MOST_NOISE])
    )
    for noise in (verify_engine.NOISE, 1e9):  # no noise excuses so much
        monkeypatch.setattr(verify_engine, "NOISE", noise)
        with pytest.raises(CheckFailed, match=r"oracle: request 1: position 3: logprobs differ by"):
            oracle(model, MIXED, done)


@pytest.mark.parametrize(("threads", "told"), [(1, "1 thread"), (2, "2 threads")])
def test_the_plan_counts_threads(threads: int, told: str, tiny: Tiny) -> None:
    plan = replace(load_engine(tiny("deepseek_v3"), BASE).plan, threads=threads)
    assert next(plan.lines()).endswith(f", {told}")


def test_without_the_mode_bits_do_differ(tiny: Tiny, whole: EngineRun) -> None:
    """Or the check above could not fail."""
    with pytest.raises(CheckFailed, match="bits differ"):
        same("split", run(tiny("deepseek_v3"), MIXED, BASE, max_num_batched_tokens=8), whole,
             bitwise=True)  # fmt: skip


# -- ranks ---------------------------------------------------------------------------------


DIVISIBLE = {"num_attention_heads": 8, "hidden_size": 80, "n_routed_experts": 16,
             "intermediate_size": 96, "moe_intermediate_size": 24}  # fmt: skip
ON_RANKS = [Ask(prompt(70), 4), Ask(prompt(7), 4, arrives=1), Ask(prompt(1), 6, arrives=2)]


@pytest.mark.parametrize("config", [BASE, INVARIANT], ids=["free", "invariant"])
def test_a_divided_vocabulary_is_put_together(config: EngineConfig, tiny: Tiny) -> None:
    model = tiny("deepseek_v3", keys={**DIVISIBLE, "vocab_size": 312})
    ranks_are_as_one(model, ON_RANKS, config, 2, 8)


@pytest.mark.parametrize(
    ("stored", "narrow"), diagonal([{"dtype": "bfloat16"}, {"storage": FP8_32}], [True, False])
)
def test_ranks_have_the_bits_of_one_however_weights_are_stored(
    stored: dict[str, Any], narrow: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed in 16 bits or in 32, whatever this CPU has."""
    if narrow and refusals("linear", "onednn", Context(dtype=torch.bfloat16)):
        pytest.skip("oneDNN has no bfloat16 GEMM here")

    def choose(storage: torch.dtype, _: Any) -> tuple[torch.dtype, str]:
        return (storage if narrow else torch.float32), "as told"

    monkeypatch.setattr(plan, "choose_compute_dtype", choose)
    ranks_are_as_one(tiny("deepseek_v3", keys=DIVISIBLE, **stored), ON_RANKS, INVARIANT, 2, 8)


@pytest.mark.parametrize(
    ("linear", "family"),
    diagonal(["onednn", "torch_mm"], ["deepseek_v32", "bailing_moe_v2_5"]),
)
def test_ranks_have_the_bits_of_one_without_a_compiler(
    family: str, linear: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "unavailable", lambda: "no C++ compiler")
    config = replace(INVARIANT, ops={"linear": linear})
    model = tiny(family, keys=DIVISIBLE)
    ranks_are_as_one(model, ON_RANKS, config, 2, 4, expert_parallel=[False, True])


def test_parts_of_sums_do_not_have_the_bits_of_one(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the check above could not fail; and no rank of that kind runs in batch-invariant mode."""
    model = tiny("deepseek_v3", keys=DIVISIBLE)
    one = run(model, ON_RANKS, BASE)
    with pytest.raises(CheckFailed, match="bits differ"):
        same("parts", serve_on_ranks(model, ON_RANKS, BASE, 2)[0], one, bitwise=True)
    monkeypatch.setattr(
        ranks,
        "local_spec",
        lambda spec, number, size, **_: local_spec(spec, number, size),
    )
    with pytest.raises(AssertionError, match="bits depend on the ranks"):
        serve_on_ranks(model, ON_RANKS, INVARIANT, 2)


# -- replay, aborts, refusals ----------------------------------------------------------------


def test_expert_choices_can_be_recorded_and_forced(tiny: Tiny) -> None:
    model = tiny("deepseek_v3")
    asks = [Ask(prompt(20), 4)]
    core = load_engine(model, BASE).core
    core.executor.runner.recorded = []
    first = serve(core, asks)
    recorded = core.executor.runner.recorded
    assert len(recorded) == 4
    assert set(recorded[0].experts) == {1, 2, 3}
    again = load_engine(model, BASE).core
    again.executor.runner.forced = list(recorded)
    same("replay", serve(again, asks), first, bitwise=True)
    other = load_engine(model, BASE).core
    other.executor.runner.forced = [
        RecordedChoices({k: (v + 1) % 12 for k, v in step.experts.items()}) for step in recorded
    ]
    with pytest.raises(CheckFailed):
        same("replay", serve(other, asks), first)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 9])
def test_abort_frees_everything_and_disturbs_nobody(
    overlap: bool, at: int, tiny: Tiny, whole: EngineRun
) -> None:
    config = replace(BASE, overlap=overlap, enable_prefix_caching=False)
    core = load_engine(tiny("deepseek_v3"), config).core

    def abort(core: EngineCore, step: int) -> None:
        if step == at:
            core.abort("check-0")

    done = serve(core, MIXED, abort)
    assert done.outputs[0][-1].finish_reason == "abort"
    kept = slice(1, None)
    rest = EngineRun(done.tokens[kept], done.logits[kept], done.cached[kept], [], core)
    wanted = EngineRun(whole.tokens[kept], whole.logits[kept], whole.cached[kept], [], core)
    same("abort", rest, wanted)
    assert core.pool.num_free == core.pool.num_usable
    assert not core.requests
    core.pool.check()


def test_nan_logits_fail_that_request_only(tiny: Tiny) -> None:
    model = tiny("deepseek_v3")
    core = load_engine(model, BASE).core
    core.executor.runner.decoder.embedding[77] = float("nan")
    asks = [Ask([1, 2, 3], 4), Ask([4, 77, 5], 4), Ask([6, 7], 4)]
    done = serve(core, asks, may_fail=True)
    assert [each[-1].finish_reason for each in done.outputs] == ["length", "error", "length"]
    assert "NaN" in (done.outputs[1][-1].error or "")
    assert done.tokens[1] == []
    clean = run(model, [asks[0], asks[2]], BASE)
    assert [done.tokens[0], done.tokens[2]] == clean.tokens
    assert core.pool.num_free == core.pool.num_usable


def test_a_request_that_never_fits_is_refused_with_numbers(tiny: Tiny) -> None:
    core = load_engine(
        tiny("deepseek_v3"), replace(BASE, num_gpu_blocks_override=4, block_size=8)
    ).core
    with pytest.raises(RequestRejected, match="5 cache blocks of 8, the pool has 4"):
        serve(core, [Ask(prompt(30), 11)])
    with pytest.raises(RequestRejected, match="max_model_len=400"):
        serve(core, [Ask(prompt(400), 1)])
    assert len(serve(core, [Ask(prompt(20), 5)]).tokens[0]) == 5  # and the engine lives on


def test_stops(tiny: Tiny) -> None:
    model = tiny("deepseek_v3")
    free = run(model, [Ask(prompt(20), 12)], BASE)
    token = free.tokens[0][4]
    first = free.tokens[0].index(token)
    stopped = run(model, [Ask(prompt(20), 12, params={"stop_token_ids": [token]})], BASE)
    last = stopped.outputs[0][-1]
    assert stopped.tokens[0] == free.tokens[0][: first + 1]
    assert (last.finish_reason, last.stop_reason) == ("stop", token)
    late = {"stop_token_ids": [token], "min_tokens": first + 2}
    longer = run(model, [Ask(prompt(20), 12, params=late)], BASE)
    assert len(longer.tokens[0]) >= first + 2


def test_rows_of_different_widths_are_refused(tiny: Tiny) -> None:
    """One table of blocks serves all layers, so their rows must be alike."""
    spec = read_model(tiny("deepseek_v3"))
    first, *rest = spec.layers
    mixer = first.mixer
    assert isinstance(mixer, MLASpec)
    odd = replace(first, mixer=replace(mixer, kv_lora_rank=mixer.kv_lora_rank + 1))
    with pytest.raises(UsageError, match="rows of the same widths"):
        make_plan(replace(spec, layers=(*rest, odd)), BASE, find_device("cpu"))


def test_options_are_checked(tiny: Tiny) -> None:
    for wrong in ({"max_num_seqs": 0}, {"block_size": -1}, {"dtype": "int8"}, {"device": "tpu"},
                  {"tensor_parallel_size": 0}, {"gpu_memory_utilization": 1.5},
                  {"ops": {"mla_decod": "cpu"}}, {"ops": {"linear": "fast"}},
                  {"max_model_len": 10**6}, {"kv_cache_memory_bytes": 10},
                  {"max_num_batched_tokens": 8, "max_num_seqs": 9}):  # fmt: skip
        with pytest.raises(UsageError):
            load_engine(tiny("deepseek_v3"), EngineConfig(**wrong))
