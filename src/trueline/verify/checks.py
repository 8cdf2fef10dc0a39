"""The checks, by name. Each takes a subject and raises CheckFailed with the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trueline import reference
from trueline.errors import CheckpointError
from trueline.models import read_model
from trueline.ops.rope import inv_freq
from trueline.reference import config as second_opinion
from trueline.reference.weights import load_weights as load_reference_weights
from trueline.spec.feedforward import MoESpec
from trueline.spec.mixer import LightningSpec, MLASpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.verify.canaries import CANARY_CHECKS
from trueline.verify.cases import Subject
from trueline.verify.compressed_graphs import COMPRESSED_GRAPH_CHECKS
from trueline.verify.drafts import CAPTURED_DRAFTS, DRAFT_CHECKS
from trueline.verify.failed import CheckFailed
from trueline.verify.graphs import GPU_CHECKS
from trueline.verify.indexer import index_is_a_sum, indexer_facts
from trueline.verify.latent_cache import latent_cache
from trueline.verify.lightning import (
    Pair,
    linear_facts,
    linear_is_a_sum,
    ranks_hold_their_heads,
)
from trueline.verify.model_facts import facts_of_v4, model_facts
from trueline.verify.numerics import NUMERICS_CHECKS, PUBLISHED_CHECKS
from trueline.verify.ops import attention_ops, fp8_attention_ops, fp8_input_ops, v4_ops
from trueline.verify.ops.rope_contract import rope_contract
from trueline.verify.rank_ledger import rank_ledger
from trueline.verify.rounding import fp4_rounding
from trueline.verify.routing import routing
from trueline.verify.schedules import ENGINE_CHECKS
from trueline.verify.sparse import index_cache, sparse_ops
from trueline.verify.strict import strict
from trueline.verify.weight_values import weight_values
from trueline.weights.load import load_weights

ORACLE_GATE = 2e-5
"""Largest difference in logprob to an oracle in float64, at any position."""
FORMS_GATE = 1e-12
"""Largest relative difference of a row between the two forms of latent attention."""


def one_spec(subject: Subject) -> None:
    """Every fact of the spec equals what the reference reads in config.json for itself."""
    spec = read_model(subject.model, subject.facts)
    read = facts_of_v4 if spec.family == "deepseek_v4" else _facts
    pairs = read(spec, second_opinion.read_config(subject.model, **subject.facts), subject.model)
    wrong = [
        f"{name}: spec {_brief(ours)}, reference {_brief(theirs)}"
        for name, ours, theirs in pairs
        if not _same(ours, theirs)
    ]
    if wrong:
        raise CheckFailed(f"one-spec: {len(wrong)} facts differ: {'; '.join(wrong[:4])}")


def _facts(spec: ModelSpec, config: second_opinion.Config, model: Path) -> Iterator[Pair]:
    yield from model_facts(spec, config)
    for layer in spec.layers:
        yield from _layer_facts(layer, config)


def _layer_facts(layer: LayerSpec, config: second_opinion.Config) -> Iterator[Pair]:
    at = f"layer {layer.index} "
    mixer = layer.mixer
    linear = second_opinion.layer_is_linear(config, layer.index)
    yield at + "is linear", isinstance(mixer, LightningSpec), linear
    if linear and isinstance(mixer, LightningSpec):
        yield from linear_facts(mixer, config, layer.index)
    elif isinstance(mixer, MLASpec):
        yield from _mla_facts(mixer, config, at)
        yield from indexer_facts(mixer, config, layer.index)
    moe = layer.feed_forward
    is_moe = isinstance(moe, MoESpec)
    yield at + "is MoE", is_moe, second_opinion.layer_is_moe(config, layer.index)
    if isinstance(moe, MoESpec):
        yield from _moe_facts(moe, config, at)


def _mla_facts(mla: MLASpec, config: second_opinion.Config, at: str) -> Iterator[Pair]:
    yield at + "heads", mla.heads.total, config.num_attention_heads
    for name in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "latent_norm_eps",
    ):
        yield at + name, getattr(mla, name), getattr(config, name)
    yield at + "softmax_scale", mla.softmax_scale, second_opinion.softmax_scale(config)
    yield at + "rope.pairing", mla.rope.pairing == "interleaved", config.rope_interleaved
    yield at + "cos_sin_scale", mla.rope.cos_sin_scale, second_opinion.cos_sin_scale(config)
    theirs = second_opinion.inverse_frequencies(config)
    yield at + "rope.inv_freq", inv_freq(mla.rope), theirs


def _moe_facts(moe: MoESpec, config: second_opinion.Config, at: str) -> Iterator[Pair]:
    router = moe.router
    yield at + "experts", moe.experts.total, config.n_routed_experts
    shared = moe.shared_width.total if moe.shared_width else 0
    yield at + "shared_width", shared, config.n_shared_experts * config.shared_expert_width
    yield at + "scoring", router.scoring, config.scoring_func
    yield at + "groups", router.num_groups, config.n_group
    yield at + "top_groups", router.top_groups, config.topk_group
    yield at + "top_k", router.top_k, config.num_experts_per_tok
    yield at + "renormalise", router.renormalise, config.norm_topk_prob
    yield at + "scaling_factor", router.scaling_factor, config.routed_scaling_factor
    sigmoid = config.scoring_func == "sigmoid"
    yield at + "correction_bias", router.correction_bias, sigmoid
    expected = None if config.n_group == 1 else "top2_sum" if sigmoid else "max"
    yield at + "group_score", router.group_score, expected


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, float) and isinstance(theirs, (float, int)):
        return abs(ours - theirs) <= 1e-15 * abs(theirs)
    return bool(ours == theirs)


def _brief(value: object) -> str:
    if isinstance(value, Tensor):
        return f"[{len(value)}] {[float(f'{x:.6g}') for x in value[:4].tolist()]}…"
    return repr(value)


def oracle(subject: Subject) -> None:
    """The reference in float64 equals an independent implementation, at every position."""
    if subject.oracle is None:
        raise CheckFailed("oracle: the subject carries no oracle to compare with")
    with torch.no_grad():
        ours = reference.load(subject.model, **subject.facts).logprobs(
            subject.tokens, subject.positions
        )
    off = (ours - subject.oracle).abs().amax(dim=-1)
    worst = int(off.argmax())
    if not bool(off.max() <= ORACLE_GATE):  # also when NaN
        raise CheckFailed(
            f"oracle: position {int(subject.positions[worst])}: logprobs differ by "
            f"{float(off[worst]):.3g}, accepted {ORACLE_GATE:g}"
        )


def absorbed_equals_expanded(subject: Subject) -> None:
    """What decode does equals what prefill does: latent layers absorbed or expanded, linear layers
    token by token or in tiles."""
    model = reference.load(subject.model, **subject.facts)
    with torch.no_grad():
        expanded, absorbed = (
            model.logits(subject.tokens, subject.positions, form=form)
            for form in ("expanded", "absorbed")
        )
    off = (expanded - absorbed).norm(dim=-1) / expanded.norm(dim=-1)
    if not bool(off.max() <= FORMS_GATE):
        raise CheckFailed(
            f"absorbed = expanded: position {int(subject.positions[int(off.argmax())])} differs "
            f"by {float(off.max()):.3g} relative, accepted {FORMS_GATE:g}"
        )


def ledger(subject: Subject) -> None:
    """Every tensor is used once, every parameter filled once, with the values that the
    reference's own loader finds."""
    spec = read_model(subject.model)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    try:
        ours = load_weights(subject.model, spec, dtype=dtype)
    except CheckpointError as error:
        raise CheckFailed(f"ledger: {error}") from error
    config = second_opinion.read_config(subject.model)
    theirs = load_reference_weights(subject.model, config, dtype)
    if spec.tied_embeddings:
        theirs.pop("lm_head.weight", None)
    unequal = [
        name
        for name, value in _unstacked(ours)
        if name not in theirs or not torch.equal(value.float(), theirs.pop(name).float())
    ]
    if unequal or theirs:
        raise CheckFailed(
            f"ledger: {len(unequal)} weights differ from the reference's reading"
            f" (first: {unequal[:1]}), {len(theirs)} were not loaded (first: {list(theirs)[:1]})"
        )


def _unstacked(values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Stacked experts one by one, under published names."""
    for name, value in values.items():
        stem, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            for expert, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                yield f"{stem}.experts.{expert}.gate_proj.weight", gate
                yield f"{stem}.experts.{expert}.up_proj.weight", up
        elif last == "down_proj":
            for expert, matrix in enumerate(value):
                yield f"{stem}.experts.{expert}.down_proj.weight", matrix
        else:
            yield name, value


CHECKS: Mapping[str, Callable[[Subject], None]] = {
    "one-spec": one_spec,
    "oracle": oracle,
    "absorbed = expanded": absorbed_equals_expanded,
    "ledger": ledger,
    "rank ledger": rank_ledger,
    "weight values": weight_values,
    "strict": strict,
    "routing": routing,
    "op = reference": attention_ops,
    "fp8 op = reference": fp8_attention_ops,
    "fp8 inputs, op = reference": fp8_input_ops,
    "sparse op = reference": sparse_ops,
    "V4 op = reference": v4_ops,
    "index cache": index_cache,
    "latent cache": latent_cache,
    "rope contract": rope_contract,
    "linear = sum": linear_is_a_sum,
    "index = sum": index_is_a_sum,
    "ranks = whole": ranks_hold_their_heads,
    **ENGINE_CHECKS,
    **CANARY_CHECKS,
    **NUMERICS_CHECKS,
    **PUBLISHED_CHECKS,
    "fp4 rounding": fp4_rounding,
    **GPU_CHECKS,
    **COMPRESSED_GRAPH_CHECKS,
    **DRAFT_CHECKS,
}

CAPTURED = (*GPU_CHECKS, *COMPRESSED_GRAPH_CHECKS, *CAPTURED_DRAFTS)
NEEDS: Mapping[str, str] = dict.fromkeys(CAPTURED, "needs a GPU") | dict.fromkeys(
    set(DRAFT_CHECKS) - set(CAPTURED_DRAFTS), "needs drafts, which no option asks for"
)
"""Why a run on a CPU does not meet what a check is about: it stands in for kernels and graphs that
only a GPU runs, or for a caller of the library."""
