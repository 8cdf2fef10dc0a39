"""A model that knows nothing answers in the form it is asked for, whatever else the request says
and whoever else is there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grammars import matcher
from schema_draws import SCHEMAS, problem, sample
from schemas import Schema, schemas
from trueline import LLM, SamplingParams
from trueline.errors import UsageError
from trueline.grammar.compiled import json_grammar
from trueline.outputs import CompletionOutput

Tiny = Callable[..., Path]
TOKENS = 40


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    """With room for a part of what runs at once: requests are preempted."""
    return LLM(
        tiny("deepseek_v3"), max_model_len=64, max_num_seqs=32, num_gpu_blocks_override=40,
        block_size=4, enable_prefix_caching=True, max_num_batched_tokens=96,
    )  # fmt: skip


def _params(llm: LLM, schema: Schema, draw: random.Random) -> SamplingParams:
    """Of all that goes with a form, something."""
    tokenizer = llm.get_tokenizer()
    closing = [tokenizer.encode(text)[0] for text in '"}]']
    eager = {token: draw.choice([2.0, 4.0]) for token in (*closing, *tokenizer.eos_ids)}
    some: list[dict[str, Any]] = [
        {}, {"logprobs": 2}, {"min_tokens": 3}, {"repetition_penalty": 1.2}, {"n": 2},
        {"frequency_penalty": 0.5, "presence_penalty": -0.5}, {"top_k": 5}, {"top_p": 0.5},
        {"min_p": 0.1}, {"temperature": 0.0},
    ]  # fmt: skip
    white = {"disable_any_whitespace": draw.random() < 0.8}
    asked: dict[str, Any] = {"temperature": draw.choice([0.7, 1.0, 3.0]), "logit_bias": eager}
    return SamplingParams(
        max_tokens=TOKENS,
        seed=draw.randrange(2**31),
        structured_outputs={"json": schema, **white},
        **(asked | draw.choice(some)),
    )


def _check(schema: Schema, completion: CompletionOutput, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    said = b"".join(
        tokenizer.token_bytes(token)
        for token in completion.token_ids
        if token not in tokenizer.eos_ids
    )
    if completion.error is not None:  # it is complete, and may not end yet
        assert "structured_outputs and min_tokens allow together" in completion.error, schema
        assert problem(schema, said.decode()) == "", schema
    elif completion.finish_reason == "stop":
        assert problem(schema, said.decode()) == "", schema
        assert said.decode() == completion.text
    else:
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == TOKENS
        begun = matcher(json_grammar(schema))
        assert begun.try_consume_tokens(list(said)) == len(said), (schema, said)


def _answers(llm: LLM, cases: list[Schema], draw: random.Random) -> Counter[str]:
    ended: Counter[str] = Counter()
    asked: list[tuple[Schema, SamplingParams]] = []
    for schema in cases:
        try:
            json_grammar(schema)
        except UsageError:
            continue
        asked.append((schema, _params(llm, schema, draw)))
    outputs = llm.generate(["Say it"] * len(asked), [each for _, each in asked], use_tqdm=False)
    for (schema, _), output in zip(asked, outputs, strict=True):
        for completion in output.outputs:
            _check(schema, completion, llm)
            ended[str(completion.finish_reason)] += 1
    assert llm.llm_engine.core.pool.num_free == llm.llm_engine.core.pool.num_usable
    return ended


def test_json_or_cut(llm: LLM) -> None:
    ended = _answers(llm, sample(100), random.Random(3))
    assert ended["stop"] > ended["length"] / 2
    assert llm.llm_engine.core.scheduler.counters.num_preemptions > 0


@pytest.mark.slow
def test_json_or_cut_10_000_times(llm: LLM) -> None:
    draw, ended = random.Random(4), Counter[str]()
    others = schemas(99, 3000)
    while ended.total() < 10_000:
        ended += _answers(llm, draw.sample([*SCHEMAS, *others], 400), draw)
    assert ended["stop"] > 5_000
