"""Fields that leave no token together: the request ends with their names, whenever it is found
out, and nobody else is disturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline import LLM, SamplingParams
from trueline.engine.no_token_left import no_token_left
from trueline.errors import RequestRejected, UsageError
from trueline.grammar.constraint import Constraint, Reasoning
from trueline.grammar.guide import Guide
from trueline.ops.sampling import SamplingState

Tiny = Callable[..., Path]
SIZE, EOS = 6, 5


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    options = {"max_model_len": 64, "num_gpu_blocks_override": 40, "batch_invariant": True}
    return LLM(tiny("deepseek_v3"), **options)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("form", "more", "tokens", "told"),
    [
        ({"choice": ["abc"]}, {"bad_words": ["a", "ab", "abc"]}, 0,
         "structured_outputs and bad_words"),
        ({"choice": ["abc"]}, {"bad_words": ["b", "bc"]}, 1, "structured_outputs and bad_words"),
        ({"choice": ["abc"]}, {"bad_words": ["z"], "allowed_token_ids": [64]}, 1,
         "structured_outputs and allowed_token_ids"),
        ({"choice": ["abc"]}, {"allowed_token_ids": [0, 1], "min_tokens": 2}, 0,
         "structured_outputs and allowed_token_ids"),
        ({"regex": "a(yx)?"}, {"bad_words": ["y", "yx"], "min_tokens": 3}, 1,
         "structured_outputs, bad_words and min_tokens"),
    ],
)  # fmt: skip
def test_the_fields_are_named(
    llm: LLM, form: dict[str, Any], more: dict[str, Any], tokens: int, told: str, overlap: bool
) -> None:
    plain = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True)
    (alone,) = llm.generate("Hello", plain, use_tqdm=False)
    asked = SamplingParams(
        temperature=1, seed=1, max_tokens=20, structured_outputs=form, logprobs=1, **more
    )
    llm.llm_engine.core.lag = int(overlap)
    other, ended = llm.generate(["Hello", "Hello"], [plain, asked], use_tqdm=False)
    assert other.outputs[0].token_ids == alone.outputs[0].token_ids
    completion = ended.outputs[0]
    assert (completion.finish_reason, completion.client_error) == ("error", True)
    assert len(completion.token_ids) == tokens
    assert completion.error is not None
    assert completion.error.endswith(f"no token is left that {told} allow together")
    assert ("after 1 tokens" in completion.error) == (tokens == 1)
    assert llm.llm_engine.core.pool.num_free == llm.llm_engine.core.pool.num_usable


def test_a_form_that_no_text_has(llm: LLM) -> None:
    asked = SamplingParams(structured_outputs={"regex": r"[^\x00-\U0010ffff]"})
    with pytest.raises(UsageError, match=r"^structured_outputs\.regex: no text is possible$"):
        llm.generate("Hello", asked, use_tqdm=False)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"allowed_token_ids": [64], "bad_words": ["a"]}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": [257], "min_tokens": 1}, "allowed_token_ids and min_tokens"),
    ],
)
def test_what_needs_no_step_to_be_known_is_not_admitted(
    llm: LLM, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestRejected, match=f"^no token is left that {told} allow together$"):
        llm.generate("Hello", SamplingParams(**fields), use_tqdm=False)


@given(
    allowed=st.none() | st.lists(st.integers(0, SIZE - 1), min_size=1, unique=True),
    words=st.lists(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=2)),
    output=st.lists(st.integers(0, SIZE - 1), max_size=2),
    least=st.integers(0, 2),
    forced=st.none() | st.integers(0, SIZE - 1),
)
def test_the_named_fields_suffice_and_each_is_needed(
    allowed: list[int] | None, words: list[list[int]], output: list[int], least: int,
    forced: int | None,
) -> None:  # fmt: skip
    guide = None
    if forced is not None:
        reasoning = Reasoning(end_ids=(forced,), budget=0)
        guide = Guide(Constraint(name="form", reasoning=reasoning), {}, [EOS])
    state = SamplingState(
        params=SamplingParams(allowed_token_ids=allowed, min_tokens=least), prompt_ids=[0],
        output_ids=output, position=1 + len(output), eos_ids=[EOS, SIZE + 3], seed=0,
        bad_words=words, guide=guide,
    )  # fmt: skip
    every = set(range(SIZE))
    ends = {word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1]
            and len(word) - 1 <= len(output)}  # fmt: skip
    left = {
        "form": every if forced is None else {forced},
        "allowed_token_ids": every if allowed is None else set(allowed),
        "bad_words": every - ends,
        "min_tokens": every - {EOS} if len(output) < least else every,
    }
    told = no_token_left(state, SIZE)
    assert bool(told) == (not set.intersection(*left.values()))
    if told:
        named = [name for name in left if name in told]
        assert not set.intersection(*[left[name] for name in named])
        for name in named:
            others = [left[other] for other in named if other != name]
            assert not others or set.intersection(*others)
