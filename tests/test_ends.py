"""How requests end in the core: end tokens, and what a broken request leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trueline import LLM, SamplingParams
from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.verify.engine import Ask, serve
from trueline.verify.schedules import prompt

Tiny = Callable[..., Path]
BASE = EngineConfig(max_model_len=200, max_num_seqs=4, num_gpu_blocks_override=80, block_size=8)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_end_token_ends_unless_it_is_ignored(tiny: Tiny, overlap: bool) -> None:
    llm = LLM(tiny("deepseek_v3"), max_model_len=100, num_gpu_blocks_override=40, overlap=overlap)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    end = tokenizer.eos_ids[0]
    always = {"temperature": 0, "max_tokens": 6, "logit_bias": {end: 100.0}}
    for changes, count, reason in (
        ({}, 1, "stop"),
        ({"ignore_eos": True}, 6, "length"),
        ({"min_tokens": 3}, 4, "stop"),
        ({"ignore_eos": True, "min_tokens": 3}, 6, "length"),
        ({"ignore_eos": True, "stop_token_ids": [end]}, 1, "stop"),
        ({"min_tokens": 2, "stop_token_ids": [end]}, 3, "stop"),
    ):
        only = llm.generate(["Hello"], SamplingParams(**always, **changes))[0].outputs[0]
        assert (len(only.token_ids), only.finish_reason) == (count, reason), changes


@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize("at", [3, 30])
def test_a_broken_request_leaves_nothing_to_share(tiny: Tiny, chunk: int, at: int) -> None:
    config = replace(BASE, max_num_batched_tokens=chunk)
    core = load_engine(tiny("deepseek_v3"), config).core
    tokens = prompt(40)
    tokens[at] = 77
    whole = core.runner.decoder.embedding[77].clone()
    core.runner.decoder.embedding[77] = float("nan")
    broken = serve(core, [Ask(tokens, 2)])
    assert broken.outputs[0][-1].finish_reason == "error"
    core.runner.decoder.embedding[77] = whole
    again = serve(core, [Ask(tokens, 2)])
    assert again.outputs[0][-1].finish_reason == "length"
    assert again.cached == [0]


def test_positions_that_are_cached_are_scored_too(tiny: Tiny) -> None:
    """Also where only the prompt's own tokens are asked for."""
    core = load_engine(tiny("deepseek_v3"), BASE).core
    ask = Ask(prompt(40), 2)
    serve(core, [ask])
    for count in (0, 2):
        done = serve(core, [replace(ask, params={"prompt_logprobs": count})])
        scores = [score for news in done.outputs[0] for score in news.prompt_scores]
        assert [score.token_id for score in scores] == ask.prompt[1:]
        assert {len(score.top) for score in scores} == {count}
