"""What the core knows of a request at each step: when it ends, what it leaves behind, which tokens
came before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trueline import LLM, SamplingParams
from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreRequest
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
    whole = core.executor.runner.decoder.embedding[77].clone()
    core.executor.runner.decoder.embedding[77] = float("nan")
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    core.add(CoreRequest(request_id="broken", prompt_token_ids=tokens, params=params))
    news = [told for _ in range(9) for told in core.step()]
    assert news[-1].finish_reason == "error"
    core.executor.runner.decoder.embedding[77] = whole
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


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"repetition_penalty": 1.8},
        {"bad_words": ["ab"], "temperature": 1.0, "seed": 5},
    ],
    ids=lambda params: next(iter(params)),
)
def test_which_tokens_came_before_is_known_beside_any_neighbour(
    tiny: Tiny, params: dict[str, object]
) -> None:
    """A step ahead, neighbours do not wait for their tokens; who depends on his own must. Steps are
    launched as on a GPU, where nobody has fetched the tokens of the one before."""
    options = {"max_model_len": 100, "num_gpu_blocks_override": 60, "max_num_seqs": 4}
    few = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True,
           "allowed_token_ids": [97, 98, 99]}  # fmt: skip
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    told = []
    for overlap in (False, True):
        llm = LLM(tiny("deepseek_v3"), overlap=overlap, **options)
        core = llm.llm_engine.core
        core.executor.threaded = False
        asked = [SamplingParams(**{**few, **params}), plain, plain]
        told.append([each.outputs[0].token_ids for each in llm.generate(["a", "b", "c"], asked)])
    assert told[0] == told[1]
    assert len(set(told[0][0])) > 1
