"""Compressed attention in the running engine: every schedule equals the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trueline.cache.kinds.compressed import compressed_layers
from trueline.config import EngineConfig
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.engine.loading import load_engine
from trueline.layers.context import RecordedChoices
from trueline.models import read_model
from trueline.ops.linear import torch_mm
from trueline.verify import schedules
from trueline.verify.cases import Subject, make_subject
from trueline.verify.compressed_graphs import compressed_graph_is_eager
from trueline.verify.engine import Ask, decode_is_prefill, oracle, run, same, same_bits_under, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.schedules import base, prompt

SMALL, ODD = "v4-small", "v4-odd"
CHECKS = (
    "engine oracle",
    "solo = batch",
    "prefix = cold",
    "preempt = resume",
    "poison",
    "overlapped = plain",
    "steady state",
)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    root = tmp_path_factory.mktemp("compressed")
    names = (SMALL, ODD, "v4-flat", "v4-ranks", "v4-shallow")
    return {name: make_subject(name, root / name) for name in names}


@pytest.mark.parametrize("check", CHECKS)
def test_schedules(subjects: dict[str, Subject], check: str) -> None:
    schedules.ENGINE_CHECKS[check](subjects[SMALL])


@pytest.mark.parametrize("name", [SMALL, pytest.param(ODD, marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_schedule(subjects: dict[str, Subject], name: str) -> None:
    """Chunks that end inside of windows and at their edges, with NaN in all that nobody owns."""
    subject = subjects[name]
    config = replace(base(subject), batch_invariant=True)
    asks = [Ask(prompt(43), 5), Ask(prompt(1), 9, arrives=1), Ask(prompt(24, 1), 3, arrives=1)]
    cuts = {
        f"{budget} tokens": {"max_num_batched_tokens": budget, "block_size": size, "poison": True}
        for budget, size in ((8, 16), (9, 3), (11, 5), (15, 1), (16, 8), (17, 16))
    }
    same_bits_under(subject.model, asks, config, cuts)
    decode_is_prefill(subject.model, Ask(prompt(13), 20), config)


@pytest.mark.parametrize("name", [SMALL, ODD])
def test_a_prefix_hit_has_the_bits_of_a_cold_run(subjects: dict[str, Subject], name: str) -> None:
    options = {"batch_invariant": True, "poison": True}
    schedules.prefix_is_cold(replace(subjects[name], options=options), bitwise=True)


def test_published_ratios(subjects: dict[str, Subject]) -> None:
    """Prompts that end before, at and after the first and second window of 128, cut inside."""
    subject = subjects["v4-flat"]
    config = replace(base(subject), max_model_len=600, poison=True)
    asks = [Ask(prompt(n, n), 3, arrives=i) for i, n in enumerate((127, 128, 129, 255, 258))]
    done = run(subject.model, asks, config, max_num_batched_tokens=101)
    oracle(subject.model, asks, done)
    groups = done.core.plan.groups
    assert [(g.block_size, g.window, g.window_step) for g in groups] == [
        (128, None, 1), (16, 13, 1), (8, 8, 4), (128, 128, 128)
    ]  # fmt: skip


def test_a_prefix_of_published_ratios(subjects: dict[str, Subject]) -> None:
    subject = subjects["v4-flat"]
    head = prompt(128, 3)
    asks = [Ask([*head, 1, 2], 2), Ask([*head, 3], 4, arrives=6)]
    config = replace(base(subject), batch_invariant=True, poison=True)
    warm = run(subject.model, asks, config)
    assert warm.cached == [0, 128]
    cold = run(subject.model, asks, config, enable_prefix_caching=False)
    same("prefix = cold", warm, cold, bitwise=True)


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", ["ranks = one, bitwise", "ranks = one, requests"])
def test_ranks(subjects: dict[str, Subject], check: str, size: int) -> None:
    schedules.RANK_CHECKS[check](subjects["v4-ranks"], size)


@pytest.mark.parametrize("chunk", [16, 256])
def test_what_a_sequence_holds(subjects: dict[str, Subject], chunk: int) -> None:
    """Entries grow with the sequence; windows and tails do not. What is planned by memory fits. Of
    a chunk as long as the prompt no more tails are kept, where no prefix will need them."""
    subject = subjects[SMALL]
    config = EngineConfig(
        max_model_len=300, max_num_seqs=3, max_num_batched_tokens=chunk, block_size=16,
        kv_cache_memory_bytes=3_000_000, enable_prefix_caching=chunk == 16,
    )  # fmt: skip
    core = load_engine(subject.model, config).core
    assert core.plan.cache_bytes <= 3_000_000
    most = [0] * len(core.blocks.pools)

    def watch(core: EngineCore, step: int) -> None:
        for request in core.requests.values():
            for group, table in enumerate(request.tables):
                most[group] = max(most[group], sum(block != 0 for block in table))

    serve(core, [Ask(prompt(250), 30)], watch)
    # 280 positions: entries of 16, a window of 13 in blocks of 16, tails of 8 in blocks of 8, twice
    entries, window, sparse, every = most
    assert entries == 18
    assert window <= 2 + chunk // 16
    assert sparse <= 4
    assert every <= 3
    assert max(core.blocks.most_held(280, chunk)[2:]) <= 4  # while a step runs


@pytest.mark.parametrize(
    "name",
    ["v4-shallow", *(pytest.param(each, marks=pytest.mark.slow) for each in (ODD, "v4-flat"))],
)
def test_captured_steps(subjects: dict[str, Subject], name: str) -> None:
    """Rows that complete windows and rows that do not, lengths known to the device alone."""
    compressed_graph_is_eager(subjects[name])


def test_choices_of_entries_can_be_recorded_and_forced(subjects: dict[str, Subject]) -> None:
    config, asks = base(subjects[SMALL]), [Ask(prompt(60), 3)]
    first, again, other = (load_engine(subjects[SMALL].model, config).core for _ in range(3))
    recorded: list[RecordedChoices] = []
    local_runner(first.executor).recorded = recorded
    wanted = serve(first, asks)
    assert all(step.positions for step in recorded)
    local_runner(again.executor).forced = [
        replace(step, positions=[*step.positions]) for step in recorded
    ]
    same("forced", serve(again, asks), wanted)
    local_runner(other.executor).forced = [
        replace(step, positions=[torch.arange(p.shape[1]).expand_as(p) for p in step.positions])
        for step in recorded
    ]
    with pytest.raises(CheckFailed):
        same("other choices", serve(other, asks), wanted)


def test_compressors_ask_for_float32(
    subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of products that a GPU would round to 16 bits: tails keep what no rounding has met."""
    wide, asked = torch_mm.run_wide, list[int]()

    def counted(x: Tensor, packed: torch_mm.Packed) -> Tensor:
        asked.append(packed.columns)
        return wide(x, packed)

    monkeypatch.setattr(torch_mm, "run_wide", counted)
    config = replace(base(subjects[SMALL]), ops={"linear": "torch_mm"})
    run(subjects[SMALL].model, [Ask(prompt(9), 1)], config)
    spec = read_model(subjects[SMALL].model)
    mixers = compressed_layers(spec).values()
    made = [each for m in mixers for each in (m.compressor, m.indexer and m.indexer.compressor)]
    # together or one by one; logits too
    columns = sum(each for each in asked if each != spec.vocab.total)
    assert columns == sum(2 * each.width for each in made if each)
