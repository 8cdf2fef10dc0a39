"""The offline API, as a script written for vLLM would use it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import trueline
from trueline import LLM, SamplingParams, reference
from trueline.engine.params import sequence_seed
from trueline.errors import RequestRejected, UsageError
from trueline.llm import LLMEngine
from trueline.utils.hub import find_model
from trueline.verify.engine import ORACLE_GATE

Tiny = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(tiny("deepseek_v3"), max_model_len=256, num_gpu_blocks_override=300)


def greedy_by_reference(model: Path, ids: list[int], count: int) -> list[int]:
    exact = reference.load(model)
    known = list(ids)
    with torch.no_grad():
        for _ in range(count):
            known.append(int(exact.logits(torch.tensor(known))[-1].argmax()))
    return known[len(ids) :]


def test_the_names_that_scripts_import() -> None:
    for name in ("LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob"):
        assert getattr(trueline, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = trueline.nonsense


def test_generate_gives_the_right_tokens_in_order(llm: LLM, tiny: Tiny) -> None:
    prompts = ["Hello", "a", "The line is true."]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.finished
        (only,) = output.outputs
        wanted = greedy_by_reference(tiny("deepseek_v3"), output.prompt_token_ids, 8)
        assert only.token_ids == wanted
        assert (only.index, only.finish_reason, only.stop_reason) == (0, "length", None)
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        assert only.text == tokenizer.decode(wanted, skip_special_tokens=True)


def test_every_form_of_prompt(llm: LLM) -> None:
    text = llm.generate("Hello", GREEDY)
    ids = text[0].prompt_token_ids
    for prompt in ({"prompt": "Hello"}, {"prompt_token_ids": ids}, ["Hello"]):
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == text[0].outputs[0].token_ids
    with_both = llm.generate({"prompt": "Hello", "prompt_token_ids": ids}, GREEDY)[0]
    assert (with_both.prompt, with_both.prompt_token_ids) == ("Hello", ids)


def test_params_for_each(llm: LLM) -> None:
    some = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = llm.generate(["x", "y"], some)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(UsageError, match="2 sampling_params for 1 prompts"):
        llm.generate(["x"], some)


def test_logprobs(llm: LLM, tiny: Tiny) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    (output,) = llm.generate(["Hello"], params)
    ids = output.prompt_token_ids
    (only,) = output.outputs
    exact = reference.load(tiny("deepseek_v3")).logprobs(torch.tensor([*ids, *only.token_ids]))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(ids)
    for position, each in enumerate(output.prompt_logprobs[1:], 1):
        assert each is not None
        assert each[ids[position]].logprob == pytest.approx(
            float(exact[position - 1, ids[position]]), abs=ORACLE_GATE
        )
        assert len(each) in (1, 2)  # the likeliest, and the token itself
    assert only.logprobs is not None
    total = 0.0
    for i, each in enumerate(only.logprobs):
        assert each is not None
        row = exact[len(ids) + i - 1]
        token = only.token_ids[i]
        assert list(each) == row.topk(2).indices.tolist()
        assert each[token].rank == 1
        assert each[token].decoded_token is not None
        total += each[token].logprob
    assert only.cumulative_logprob == pytest.approx(total)


def test_copies(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate(["Hello"], params)
    assert [copy.index for copy in output.outputs] == [0, 1, 2]
    assert len({tuple(copy.token_ids) for copy in output.outputs}) == 3
    for i, copy in enumerate(output.outputs):
        seed = sequence_seed(11, i)
        one = SamplingParams(temperature=1.0, seed=seed, max_tokens=6, ignore_eos=True)
        assert llm.generate(["Hello"], one)[0].outputs[0].token_ids == copy.token_ids


def test_seeds(llm: LLM) -> None:
    hot = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=1)
    first = llm.generate(["Hello"], hot)[0].outputs[0].token_ids
    assert llm.generate(["x", "Hello", "y"], hot)[1].outputs[0].token_ids == first
    free = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    drawn = {tuple(llm.generate(["Hello"], free)[0].outputs[0].token_ids) for _ in range(3)}
    assert len(drawn) == 3


def test_stop_strings_end_the_text_wherever_they_fall(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = llm.generate(["Hello"], params)[0].outputs[0].text
    plain = [i for i in range(3, len(text) - 3) if text[i : i + 2].isprintable()
             and "\ufffd" not in text[i : i + 2]]  # fmt: skip
    stop = text[plain[0] : plain[0] + 2]
    first = text.index(stop)
    for include in (False, True):
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop, "never"],
                                include_stop_str_in_output=include)  # fmt: skip
        only = llm.generate(["Hello"], params)[0].outputs[0]
        assert only.text == text[: first + (2 if include else 0)]
        assert (only.finish_reason, only.stop_reason) == ("stop", stop)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.core.pool.num_free == llm.llm_engine.core.pool.num_usable


def test_end_tokens(llm: LLM) -> None:
    free = llm.generate(["Hello"], GREEDY)[0].outputs[0]
    token = free.token_ids[3]
    at = free.token_ids.index(token)
    stops = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[token])
    only = llm.generate(["Hello"], stops)[0].outputs[0]
    assert (only.finish_reason, only.stop_reason) == ("stop", token)
    assert only.token_ids == free.token_ids[: at + 1]


def test_only_allowed_and_no_bad_words(llm: LLM) -> None:
    allowed = SamplingParams(temperature=1.0, max_tokens=20, allowed_token_ids=[65, 66],
                             ignore_eos=True)  # fmt: skip
    assert set(llm.generate(["x"], allowed)[0].outputs[0].token_ids) <= {65, 66}
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    (banned,) = tokenizer.encode("b", add_special_tokens=False)
    words = SamplingParams(temperature=1.0, seed=2, max_tokens=40, bad_words=["b"],
                           logit_bias={banned: 50.0}, ignore_eos=True)  # fmt: skip
    assert banned not in llm.generate(["x"], words)[0].outputs[0].token_ids


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert output.prompt_token_ids[:2] == [256, 260]
    several = llm.chat([messages, [{"role": "system", "content": "x"}, *messages]], GREEDY)
    assert len(several) == 2
    assert several[0].outputs[0].token_ids == output.outputs[0].token_ids
    with pytest.raises(UsageError, match="role tool is not known"):
        llm.chat([{"role": "tool", "content": "x"}], GREEDY)


def test_cached_tokens_are_reported(tiny: Tiny) -> None:
    llm = LLM(tiny("deepseek_v2"), max_model_len=256, num_gpu_blocks_override=100)
    prompt = {"prompt_token_ids": list(range(40))}
    assert [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 32]
    off = LLM(tiny("deepseek_v2"), max_model_len=256, enable_prefix_caching=False)
    assert [off.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_streaming_by_steps(tiny: Tiny) -> None:
    """What comes piece by piece is what comes at once."""
    engine = LLMEngine(tiny("deepseek_v3"), max_model_len=256)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)
    engine.add_request("a", "Hello", params)
    texts: list[str] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts.append(output.outputs[0].text)
            last = output
    assert all(b.startswith(a) for a, b in pairwise(texts))
    assert engine.tokenizer is not None
    assert texts[-1] == engine.tokenizer.decode(last.outputs[0].token_ids, True)
    engine.add_request("a", "Hello", params)  # the name is free again
    engine.add_request("b", "Hello", params)
    assert engine.abort_request("a")
    assert not engine.abort_request("never")
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            finished[output.request_id] = output.outputs[0].finish_reason
    assert finished == {"a": "abort", "b": "length"}


def test_ids_only(tiny: Tiny) -> None:
    llm = LLM(tiny("deepseek_v3"), skip_tokenizer_init=True, max_model_len=64)
    only = llm.generate({"prompt_token_ids": [1, 2]}, GREEDY)[0].outputs[0]
    assert only.text == ""
    assert len(only.token_ids) == 8
    with pytest.raises(UsageError, match="prompt_token_ids instead"):
        llm.generate("text", GREEDY)


def test_dummy_weights(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny("deepseek_v3") / "config.json").read_text())
    llm = LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, max_model_len=64)
    assert len(llm.generate({"prompt_token_ids": [1]}, GREEDY)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_other_dtypes_serve(dtype: str, tiny: Tiny) -> None:
    model = tiny("deepseek_v3", dtype="bfloat16")
    llm = LLM(model, dtype=dtype, max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate(["Hello, true line"], params)
    exact = reference.load(model).logprobs(torch.tensor(output.prompt_token_ids))
    assert output.prompt_logprobs is not None
    # experts flip on near ties in 16 bits, so only most positions can agree
    off = sorted(
        abs(each[token].logprob - float(exact[i, token]))
        for i, (each, token) in enumerate(
            zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        )
        if each is not None
    )
    assert off[len(off) // 2] < 0.5
    assert llm.llm_engine.plan.dtype_reason


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"max_modle_len": 5}, "nearest known name is 'max_model_len'"),
        ({"tensor_parallel_size": 0}, "accepted: a whole number from 1 up"),
        ({"ops": {"linear": "quick"}}, "accepted: native, onednn"),
    ],
)
def test_wrong_options(arguments: dict[str, Any], part: str, tiny: Tiny) -> None:
    with pytest.raises(UsageError) as caught:
        LLM(tiny("deepseek_v3"), **arguments)
    assert part in str(caught.value)


def test_bad_prompts_leave_the_engine_alive(llm: LLM) -> None:
    for wrong, part in (
        ("", "at least one token"),
        ({"prompt_token_ids": [311]}, "ids from 0 to 310"),
        ({"prompt_token_ids": []}, "at least one token"),
        ({"text": "x"}, "accepted: 'prompt' or 'prompt_token_ids'"),
        (5, "accepted: text"),
    ):
        with pytest.raises(UsageError, match=part):
            llm.generate([wrong], GREEDY)
    with pytest.raises(RequestRejected, match="max_model_len=256"):
        llm.generate(["ok", {"prompt_token_ids": [1] * 300}], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate("ok", GREEDY)[0].outputs[0].token_ids) == 8


def test_an_answer_longer_than_there_is_room_for(llm: LLM) -> None:
    """Refused as by the server; None fills what is left."""
    prompt = {"prompt_token_ids": [1] * 250}
    for name in ("max_tokens", "min_tokens"):
        params = SamplingParams(**{"max_tokens": 7, name: 7})
        with pytest.raises(UsageError, match=r"7: the prompt has 250 tokens, .* leaves 6 for"):
            llm.generate([prompt], params, use_tqdm=False)
    for most in (6, None):
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        (found,) = llm.generate([prompt], params, use_tqdm=False)
        assert len(found.outputs[0].token_ids) == 6


def test_params_are_checked_against_the_model(llm: LLM) -> None:
    for wrong in (
        SamplingParams(logit_bias={311: 1.0}),
        SamplingParams(allowed_token_ids=[400]),
        SamplingParams(logprobs=21),
    ):
        with pytest.raises(UsageError):
            llm.generate("x", wrong)


def test_no_stop_before_min_tokens(llm: LLM) -> None:
    text = llm.generate(["Hello"], GREEDY)[0].outputs[0].text
    stop = next(char for char in text if char != "\ufffd")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=[stop], min_tokens=8)
    assert len(llm.generate(["Hello"], params)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize(("variable", "below"), [("HF_HUB_CACHE", "."), ("HF_HOME", "hub")])
def test_hub_ids_are_found_in_the_cache(
    variable: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(UsageError, match="not in the local cache"):
        find_model("org/name")
    folder = tmp_path / below / "models--org--name"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    assert find_model("org/name") == folder / "snapshots" / "abc"
    (folder / "snapshots" / "def").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("def\n")
    assert find_model("org/name") == folder / "snapshots" / "def"
    with pytest.raises(UsageError, match="no such directory"):
        find_model("nothing")


def test_nan_never_becomes_a_token(tiny: Tiny) -> None:
    llm = LLM(tiny("deepseek_v3"), max_model_len=64)
    llm.llm_engine.core.executor.runner.decoder.embedding[9] = math.nan
    (output,) = llm.generate({"prompt_token_ids": [1, 9]}, GREEDY)
    only = output.outputs[0]
    assert only.finish_reason == "error"
    assert only.token_ids == []
    assert "NaN" in (only.error or "")
