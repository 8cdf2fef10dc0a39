"""Each form of structured output beside each other option of a request: the text keeps to the form,
and tokens, logprobs and ends are, bit by bit, those that the request has alone, in one piece, with
room for everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from grammars import matcher
from trueline import LLM, SamplingParams
from trueline.grammar.structured import StructuredOutputsParams
from trueline.outputs import CompletionOutput, RequestOutput

Tiny = Callable[..., Path]
RECORD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": RECORD, "disable_any_whitespace": True},
    "json_object": {"json_object": True},
    "regex": {"regex": "[a-f]{2,9}(-[0-9]+)?"},
    "choice": {"choice": ["yes", "no", "maybe so"]},
    "grammar": {"grammar": 'start: "(" start ")" | /[a-c]+[0-9]/'},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "n": {"n": 2},
    "greedy": {"temperature": 0.0},
    "seed": {"seed": 77},
    "logprobs": {"logprobs": 2},
    "all logprobs": {"logprobs": -1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "stop": {"stop": ["e", "b", '"']},
    "include_stop_str_in_output": {"stop": ["a", "1"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [*range(48, 52), *range(97, 99)]},
    "min_tokens": {"min_tokens": 5},
    "ignore_eos": {"ignore_eos": True},
    "max_tokens": {"max_tokens": 3},
    "bad_words": {"bad_words": ["b", "1", "no"]},
    "logit_bias": {"logit_bias": {48: 8.0, 49: -9.0, 98: 5.0}},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": -0.4},
    "filters": {"top_k": 7, "top_p": 0.8, "min_p": 0.02},
}
BASE: dict[str, Any] = {"temperature": 1.2, "max_tokens": 24}
PROMPTS = ["Say it: ", "To a long question there is " * 3, "To a long question there is none"]
PAIRS = [(form, option) for form in FORMS for option in OPTIONS]
FEW = list(zip(cycle(FORMS), OPTIONS))
"""Each option once, with one form after the other."""
OPTIONS_OF_LLM: dict[str, Any] = {"max_model_len": 128, "batch_invariant": True, "max_logprobs": -1}


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Callable[[str], Path]:
    return lambda family: tiny(family, keys={"vocab_size": 300})


def params(form: str, option: str) -> SamplingParams:
    asked = BASE | {"seed": PAIRS.index((form, option))} | OPTIONS[option]
    return SamplingParams(**asked, structured_outputs=StructuredOutputsParams(**FORMS[form]))


def prompt(form: str, option: str) -> str:
    return PROMPTS[PAIRS.index((form, option)) % len(PROMPTS)]


def told(output: RequestOutput) -> Any:
    """All but the request's name and what the cache has saved."""
    ends = [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs,
         each.cumulative_logprob, each.error and each.error.partition(": ")[2])
        for each in output.outputs
    ]  # fmt: skip
    return ends, output.prompt_logprobs


@cache
def _grammar(form: str) -> str:
    return StructuredOutputsParams(**FORMS[form]).compiled()


def keeps_to(llm: LLM, form: str, option: str, said: CompletionOutput) -> bool:
    """Whether it came to the form's end."""
    tokenizer = llm.get_tokenizer()
    ids = [token for token in said.token_ids if token not in tokenizer.eos_ids]
    text = b"".join(map(tokenizer.token_bytes, ids))
    begun = matcher(_grammar(form))
    assert begun.try_consume_tokens(list(text)) == len(text), (form, option, text)
    if said.error is not None:
        assert "no token is left that structured_outputs and " in said.error, (form, option)
        return False
    if option == "ignore_eos":
        assert not set(said.token_ids) & set(tokenizer.eos_ids)
    if said.finish_reason == "length":
        assert len(said.token_ids) == OPTIONS[option].get("max_tokens", BASE["max_tokens"])
        return False
    assert said.finish_reason == "stop"
    if said.stop_reason is not None:
        assert {"stop", "stop_token_ids"} & OPTIONS[option].keys(), (form, option)
        return False
    assert begun.is_accepting(), (form, option, text)
    assert text.decode() == said.text
    return True


def alone(model: Path, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], RequestOutput]:
    llm = LLM(model, overlap=False, enable_prefix_caching=False, max_num_seqs=4, **OPTIONS_OF_LLM)
    found = {
        pair: llm.generate([prompt(*pair)], params(*pair), use_tqdm=False)[0] for pair in pairs
    }
    ended = sum(
        keeps_to(llm, *pair, said) for pair, output in found.items() for said in output.outputs
    )
    assert ended > len(pairs) / 3
    return found


def crowded(model: Path, **more: Any) -> LLM:
    """Prompts are cut, prefixes shared, requests preempted."""
    options: dict[str, Any] = {
        "max_num_seqs": 12, "max_num_batched_tokens": 24, "block_size": 4,
        "num_gpu_blocks_override": 64, "enable_prefix_caching": True,
    }  # fmt: skip
    return LLM(model, **OPTIONS_OF_LLM, **(options | more))


def together(llm: LLM, pairs: Sequence[tuple[str, str]], lag: int) -> list[Any]:
    """With one that has no form beside every second."""
    core = llm.llm_engine.core
    core.lag = lag
    plain = [SamplingParams(**BASE, seed=i) for i in range(len(pairs) // 2)]
    prompts = [*(prompt(*pair) for pair in pairs), *(PROMPTS[0] for _ in plain)]
    outputs = llm.generate(prompts, [*(params(*pair) for pair in pairs), *plain], use_tqdm=False)
    while core.has_unfinished():  # a step that runs ahead
        core.step()
    assert core.pool.num_free == core.pool.num_usable
    return list(map(told, outputs[: len(pairs)]))


def compare(model: Path, pairs: Sequence[tuple[str, str]], **more: Any) -> None:
    wanted = [told(output) for output in alone(model, pairs).values()]
    llm = crowded(model, **more)
    for lag in (0, 1):
        found = together(llm, pairs, lag)
        differing = [p for p, a, b in zip(pairs, found, wanted, strict=True) if a != b]
        assert not differing, (lag, differing)
    core = llm.llm_engine.core
    pressed = core.scheduler.counters.num_preemptions > 0 and core.pool.num_hit_tokens > 0
    assert pressed or core.pool.block_size == OPTIONS_OF_LLM["max_model_len"]
    core.close()


def test_each_option_beside_a_form(model: Callable[[str], Path]) -> None:
    compare(model("deepseek_v3"), FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "bailing_moe_v2_5", "deepseek_v32", "deepseek_v4"]
)
def test_each_option_beside_each_form(model: Callable[[str], Path], family: str) -> None:
    compare(model(family), PAIRS)


@pytest.mark.slow
def test_ranks_draw_what_one_does(tiny: Tiny) -> None:
    """Guides are on the first rank alone."""
    keys = {"num_attention_heads": 8, "hidden_size": 80, "n_routed_experts": 16, "vocab_size": 300,
            "intermediate_size": 96, "moe_intermediate_size": 24}  # fmt: skip
    compare(tiny("deepseek_v3", keys=keys), FEW, tensor_parallel_size=2)


def test_logprobs_are_of_the_model_without_the_form(model: Callable[[str], Path]) -> None:
    """As of a prompt that says the same."""
    llm = LLM(model("deepseek_v3"), **OPTIONS_OF_LLM)
    forms = [form for form in FORMS for _ in range(2)]
    asked = [
        SamplingParams(**BASE, seed=i, logprobs=3, structured_outputs=FORMS[form])
        for i, form in enumerate(forms)
    ]
    for output in llm.generate(PROMPTS[:1] * len(asked), asked, use_tqdm=False):
        ids, (said,) = output.prompt_token_ids, output.outputs
        assert said.logprobs is not None
        again = {"prompt_token_ids": [*ids, *said.token_ids]}
        scored = SamplingParams(max_tokens=1, prompt_logprobs=3)
        (plain,) = llm.generate([again], scored, use_tqdm=False)
        assert plain.prompt_logprobs is not None
        assert plain.prompt_logprobs[len(ids) :] == said.logprobs
        assert (
            max(each[token].rank for each, token in zip(said.logprobs, said.token_ids, strict=True))
            > 3
        )


def test_one_that_leaves_takes_nothing_along(model: Callable[[str], Path]) -> None:
    """While its grammar is compiled, in its prompt, and at any of its tokens."""
    llm = crowded(model("deepseek_v3"), num_gpu_blocks_override=200)
    engine, core = llm.llm_engine, llm.llm_engine.core
    stays = SamplingParams(**BASE, seed=5, structured_outputs=FORMS["json"])
    (wanted,) = llm.generate([PROMPTS[1]], stays, use_tqdm=False)
    for lag in (0, 1):
        core.lag = lag
        for after in range(8):
            added = core.scheduler.counters.num_added
            engine.add_request("stays", PROMPTS[1], stays)
            engine.add_request("leaves", PROMPTS[2], params("json_object", "n"))
            found: list[RequestOutput] = []
            first = after == 0
            if first:  # it is compiled, and not admitted yet
                wait([each.guide for each in core.grammars._waiting.values()])
            while core.has_unfinished():
                if after == 0:
                    engine.abort_request("leaves")
                after -= 1
                found += [each for each in engine.step() if each.finished]
            assert [told(each) for each in found if each.request_id == "stays"] == [told(wanted)]
            assert core.pool.num_free == core.pool.num_usable
            assert not len(core.grammars)
            if first:
                assert core.scheduler.counters.num_added == added + 1
