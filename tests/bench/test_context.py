"""What a long context takes: by kind, what the spec says, whatever the blocks are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paths import CONFIGS
from trueline.bench.cache_bytes import KindBytes, cache_bytes, kept_bytes
from trueline.bench.context import OpClock, context_engine, pretend_computed
from trueline.cache.layout import STORAGES
from trueline.engine.params import SamplingParams
from trueline.models import read_model

Tiny = Callable[..., Path]
GROWING = {
    "latent": 1,
    "index_keys": 1,
    "entries_sparse": 4,
    "entries_index": 4,
    "entries_all": 128,
}
"""Positions of a row; the other kinds keep as much of any context."""
LONG = 1 << 16


def held(model: Path, length: int) -> dict[str, KindBytes]:
    """Of a request with so many tokens, after a step for those beyond a prefix that is found."""
    engine = context_engine(str(model), [length], 1, 2)
    prompt = [i % 300 for i in range(length)]
    pretend_computed(engine, prompt)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine.add_request("a", {"prompt_token_ids": prompt}, params)
    engine.step()
    return {each.kind: each for each in cache_bytes(engine, "a")}


@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v32", "deepseek_v3"])
def test_a_long_context_holds_what_the_spec_says(family: str, tiny: Tiny) -> None:
    """64k tokens: to a block of what grows, and no more than of a short one of what does not."""
    model = tiny(family, keys={"max_position_embeddings": 2 * LONG})
    short, long = held(model, 1 << 11), held(model, LONG)
    assert set(short) == set(long)
    for name, each in long.items():
        assert each.positions == LONG
        if name in GROWING:
            assert each.formula <= each.held < each.formula + each.block
            assert each.formula * short[name].positions == short[name].formula * LONG
        else:
            assert each.formula == short[name].formula
            assert each.held == short[name].held <= each.formula + 2 * each.block


SELECTION = {"index_scores", "topk"}
TIMED = {
    "deepseek_v4": {"compress", "sink_attention", *SELECTION},
    "deepseek_v32": {"sparse_mla", *SELECTION},
    "deepseek_v3": {"mla_decode"},
}


@pytest.mark.parametrize("family", TIMED)
def test_all_that_grows_counts_as_attention(family: str, tiny: Tiny) -> None:
    engine = context_engine(str(tiny(family)), [300], 1, 8)
    clock, prompt = OpClock(engine), list(range(300))
    pretend_computed(engine, prompt)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.add_request("a", {"prompt_token_ids": prompt}, params)
    engine.step()
    clock.seconds.clear()
    while engine.has_unfinished_requests():
        engine.step()
    assert set(clock.seconds) == TIMED[family]


def test_bytes_of_a_token_are_the_published_ones() -> None:
    """Of three selecting and three other compressed layers of Flash's widths, keys in fp8."""
    kept = kept_bytes(read_model(CONFIGS / "v4s"), 2, STORAGES["e4m3fn"], LONG)
    row, key = 512 * 2, 128 + 4
    assert kept == {
        "window": 8 * 128 * row,
        "entries_sparse": 3 * LONG // 4 * row,
        "entries_index": 3 * LONG // 4 * key,
        "entries_all": 3 * LONG // 128 * row,
        "tails_sparse": 3 * 8 * 2 * 1024 * 4,
        "tails_index": 3 * 8 * 2 * 256 * 4,
        "tails_all": 3 * 128 * 2 * 512 * 4,
    }
