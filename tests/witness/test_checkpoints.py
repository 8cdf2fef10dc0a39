"""The weights of the built-in models: what the README says of them, facts that make them witnesses,
and transformers as a second opinion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from trueline import LLM, SamplingParams, reference
from trueline.reference import config as facts
from trueline.reference import v4_facts
from trueline.reference.indexer import kept
from trueline.tasks import stories
from trueline.utils.builtin import BUILTIN_MODELS
from trueline.witness.measure import ask_together
from trueline.witness.run import ProblemSets, engine_of, faults_of
from trueline.witness.stories import switched_on

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

SPARSE = ("witness-v32", "witness-glm5")
SELECTING = (*SPARSE, "witness-v4")
"""V4 selects entries, each of several tokens."""
IN_TRANSFORMERS = ("witness-v3", "witness-v32", "witness-glm5", "witness-k25", "witness-v4")
BIASES = ("e_score_correction_bias", "expert_bias", "gate.bias")
PRECISE = (*BIASES, "attn_sink", "ape", "hc_head_fn", "_base", "_scale", "attn_fn", "ffn_fn")
LONG = 600


def path_of(name: str) -> Path:
    return BUILTIN_MODELS[name].path


def tokens_of(name: str, problem: stories.Problem) -> list[int]:
    """As the chat template has question and solution."""
    known = Tokenizer.from_file(str(path_of(name) / "tokenizer.json"))
    question, solution = problem.question, problem.solution
    text = f"<|begin|><|user|>{question}<|end|><|assistant|>{solution}<|end|>"
    ids: list[int] = known.encode(text).ids
    return ids


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_stored_in_bfloat16(name: str) -> None:
    with safe_open(path_of(name) / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            expected = "F32" if key.endswith(PRECISE) else "BF16"
            if key.endswith("tid2eid"):
                expected = "I64"
            assert file.get_slice(key).get_dtype() == expected, key


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_correction_bias_is_trained(name: str) -> None:
    params = reference.load(path_of(name)).params
    biases = [bias for key, bias in params.items() if key.endswith(BIASES)]
    assert len(biases) >= (4 if name == "witness-v4" else 5)  # V4's first two layers are hashed
    assert all(bias.unique().numel() > 2 for bias in biases)


def test_facts_that_make_a_witness() -> None:
    v3, ling, v32, glm5, k25, v4 = (reference.read_config(path_of(name)) for name in BUILTIN_MODELS)
    for config in (v3, v32, k25):
        assert config.yarn is not None
        assert config.yarn.original_max_position_embeddings < LONG
        plain = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        assert facts.softmax_scale(config) / plain > 1.8
    assert v3.n_group > v3.topk_group > 1
    assert k25.num_attention_heads == 8
    raw = json.loads((path_of("witness-k25") / "config.json").read_text())
    assert raw["text_config"]["num_attention_heads"] == 8
    assert 2 * ling.linear_facts.rotary_dim == ling.linear_facts.head_dim
    linear = [facts.layer_is_linear(ling, layer) for layer in range(ling.num_hidden_layers)]
    assert linear == [True, True, True, False] * 2
    for config in (v32, glm5):
        assert config.indexer_facts.index_topk <= LONG / 8
    assert not any(v32.indexer_facts.shared)
    assert any(glm5.indexer_facts.shared)
    assert glm5.indexer_facts.interleaved
    assert not v32.indexer_facts.interleaved
    # before itself a token of V4's sees entries alone: the newest a token late hides what was last
    assert v4.v4_facts.sliding_window == 1
    assert set(v4.v4_facts.ratios) == {2}
    assert {v4_facts.SPARSE, v4_facts.ALL} == set(v4.v4_facts.forms)
    assert 2 * v4.v4_facts.index_topk <= LONG / 4
    assert v4.yarn is not None
    assert facts.mscale(v4.yarn.factor, 1.0) ** 2 > 1.8
    assert sum(v4.v4_facts.hashed) == 2


@pytest.mark.parametrize("name", SPARSE)
def test_indexer_finds_what_attention_looks_at(name: str) -> None:
    """Of what the heads look at when they may see everything, the selected keys of a long problem
    have nearly as much as any as many keys could have. Keys at random would have half of that in
    the first layer, whose attention is broad, and an eighth in the others."""
    model = reference.load(path_of(name), torch.float32)
    tokens = tokens_of(name, stories.problems("long", "test", 1)[0])
    late = slice(len(tokens) // 2, None)
    selected: dict[int, Tensor] = {}
    model.logits(tokens, selected=selected)
    shares: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        original = reference.model.softmax_over

        def watched(scores: Tensor, seen: Tensor) -> Tensor:
            attention = original(scores, torch.ones_like(seen).tril()).mean(0)[late]
            chosen = kept(selected[len(shares)], len(tokens))[late]
            best = attention.topk(model.config.indexer_facts.index_topk).values
            shares.append(float((attention * chosen).sum() / best.sum()))
            return original(scores, seen)

        patch.setattr(reference.model, "softmax_over", watched)
        model.logits(tokens)
    assert len(shares) == model.config.num_hidden_layers
    assert min(shares) > 0.75


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_most_answers_are_right(name: str) -> None:
    """A quick look; docs/witness.md has the figures of a thousand."""
    problems = [one for kind in stories.ARITHMETIC for one in stories.problems(kind, "test", 8)]
    problems += stories.problems("other", "test", 4)
    llm = LLM(name, max_model_len=512, device="cpu")
    asked = [[{"role": "user", "content": one.question}] for one in problems]
    outputs = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=128), use_tqdm=False)
    right = [
        stories.is_right(one.answer, out.outputs[0].text)
        for one, out in zip(problems, outputs, strict=True)
    ]
    assert sum(right) >= 32
    assert all(right[-4:])


@pytest.mark.slow
def test_v4s_faults_cost_twenty_points() -> None:
    """Of the problems of 2 to 5 operations, in a mixed batch."""
    model, sets = BUILTIN_MODELS["witness-v4"], ProblemSets.draw(64, 0)
    costly = [fault for fault in faults_of(model) if fault.faults != ("engine-v4-mscale",)]
    with engine_of(model, {"device": "cpu"}) as engine:
        right = ask_together(engine, sets.problems, lambda: None).accuracy
    for fault in costly:
        with switched_on(fault), engine_of(model, {"device": "cpu"}) as engine:
            broken = ask_together(engine, sets.problems, lambda: None).accuracy
        assert right - broken > 0.2, fault.what


def in_transformers(name: str) -> Any:
    path = path_of(name)
    config = transformers.AutoConfig.from_pretrained(path)
    family = "AutoModelForImageTextToText" if name == "witness-k25" else "AutoModelForCausalLM"
    load: Callable[..., Any] = getattr(transformers, family).from_pretrained
    model, told = load(
        path,
        config=config,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    missing = [key for key in told["missing_keys"] if "vision" not in key and "mm_" not in key]
    assert not missing
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    return model


@pytest.mark.parametrize(
    "name",
    [
        # v3's blocks under other names, of which test_reference_oracle.py has a case
        pytest.param(name, marks=[pytest.mark.slow] if name == "witness-k25" else [])
        for name in IN_TRANSFORMERS
    ],
)
def test_transformers_agrees(name: str) -> None:
    """Every position of a short and a long problem. Its index scores are float32, so that a sparse
    model may see another key of about the same score."""
    oracle, model = in_transformers(name), reference.load(path_of(name))
    for category in ("5 operations", "long"):
        tokens = tokens_of(name, stories.problems(category, "test", 1)[0])
        with torch.no_grad():
            theirs = oracle(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        ours = model.logprobs(tokens)
        assert (theirs - ours).abs().max() < (3e-4 if name in SELECTING else 3e-5)
        assert (theirs.argmax(-1) == ours.argmax(-1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_transformers_scores_the_same(name: str) -> None:
    """Whole solutions, each token the likeliest after the right ones before: by transformers, by
    the reference."""
    oracle, model = in_transformers(name), reference.load(path_of(name))
    right = [0, 0]
    for problem in stories.problems("4 operations", "test", 60):
        tokens = tokens_of(name, problem)
        end = Tokenizer.from_file(str(path_of(name) / "tokenizer.json")).token_to_id(
            "<|assistant|>"
        )
        start = tokens.index(end) + 1
        with torch.no_grad():
            theirs = oracle(input_ids=torch.tensor([tokens])).logits[0]
        for place, logits in enumerate((theirs, model.logits(tokens))):
            written = logits[start - 1 : -1].argmax(-1).tolist()
            right[place] += written == tokens[start:]
    assert right[0] == right[1]
    assert right[0] > 48
