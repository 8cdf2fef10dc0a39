"""Linear layers: their facts, what a rank holds of them, and a third opinion on what they compute.

No other library has this family. So the reference's two forms are held against a third: the sum
that both stand for, written out token by token and head by head, from the stored names and keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from trueline import reference
from trueline.models import config_file, read_model
from trueline.ops.rope import inv_freq
from trueline.reference import bailing as second_opinion
from trueline.reference import config as reference_config
from trueline.reference import lightning
from trueline.reference.model import MIX, Sequence
from trueline.spec.fields import read_json
from trueline.spec.mixer import LightningSpec
from trueline.spec.shard import local_spec
from trueline.spec.source import Span
from trueline.utils.json_types import JSON
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed
from trueline.weights.load import load_weights

Pair = tuple[str, object, object]
"""A fact: its name, the spec's value, the reference's."""
GATE = 1e-12
TOKENS = 40
RANKS = 2


def linear_facts(
    mixer: LightningSpec, config: reference_config.Config, layer: int
) -> Iterator[Pair]:
    at, linear = f"layer {layer} ", config.linear_facts
    yield at + "heads", mixer.heads.total, config.num_attention_heads
    yield at + "head_dim", mixer.head_dim, linear.head_dim
    yield at + "qk_norm", mixer.qk_norm, linear.use_qk_norm
    yield at + "silu", mixer.silu, linear.silu
    yield at + "norm_groups", mixer.norm_groups.total, linear.group_norm_size
    yield at + "norm_eps", mixer.norm_eps, config.rms_norm_eps
    yield at + "scale", mixer.scale, lightning.scale(config)
    rotated = 0 if mixer.rope is None else mixer.rope.dim
    yield at + "rotated channels", rotated, linear.rotary_dim
    if mixer.rope is not None:
        theirs = reference_config.linear_inverse_frequencies(config)
        yield at + "rope.inv_freq", inv_freq(mixer.rope), theirs
        yield at + "rope.pairing", mixer.rope.pairing, "half-split"
        scale = reference_config.cos_sin_scale(config)
        yield at + "cos_sin_scale", mixer.rope.cos_sin_scale, scale
    slopes = second_opinion.slopes(
        linear, config.num_attention_heads, config.num_hidden_layers, layer
    )
    # a rank of two has the slopes of its own heads
    half = mixer.heads.total // RANKS
    for here in (mixer.heads, Span(half, 2 * half, mixer.heads.total)):
        local = replace(mixer, heads=here).slopes
        for head, ours in zip(range(here.start, here.stop), local, strict=True):
            yield f"{at}slope of head {head}", ours, slopes[head]


def linear_is_a_sum(subject: Subject) -> None:
    """Every linear layer of the reference, in both forms, equals Σ λ^(t-j) (q_t·k_j) v_j, normed in
    groups, gated and projected."""
    raw = read_json(config_file(subject.model))
    if raw.get("rope_scaling") or raw.get("rope_parameters"):
        raise CheckFailed("linear = sum: the sum is written for plain rope")
    stored = {name: value.double() for name, value in load_file(_weights(subject)).items()}
    model = reference.load(subject.model, **subject.facts)
    generator = torch.Generator().manual_seed(7)
    h = torch.randn(TOKENS, raw["hidden_size"], generator=generator, dtype=torch.float64)
    positions = subject.positions[:TOKENS]
    minus = 1 if subject.facts.get("linear_layer_factor") == "l-1" else 0
    names = {name.split(".")[2] for name in stored if name.endswith(".g_norm.weight")}
    for layer in sorted(map(int, names)):
        wanted = h + _sum_layer(raw, stored, layer, h, positions, minus)
        for form in ("expanded", "absorbed"):
            sequence = Sequence(torch.zeros(TOKENS), positions, form)
            y = model.mixed(layer, model.entry(layer, MIX, h), sequence)
            got = model.add(layer, MIX, h, y)
            off = float(((got - wanted).norm(dim=-1) / (wanted - h).norm(dim=-1)).max())
            if not off <= GATE:
                raise CheckFailed(
                    f"linear = sum: layer {layer}, {form}: {off:.3g} off, accepted {GATE:g}"
                )


def _weights(subject: Subject) -> str:
    return str(subject.model / "model.safetensors")


def _sum_layer(
    raw: JSON,
    stored: Mapping[str, Tensor],
    layer: int,
    h: Tensor,
    positions: Tensor,
    minus: int,
) -> Tensor:
    heads, d, eps = raw["num_attention_heads"], raw["head_dim"], raw["rms_norm_eps"]
    name = f"model.layers.{layer}"
    w = {key.removeprefix(f"{name}.attention."): value for key, value in stored.items()}
    x = _normed(h, eps) * stored[f"{name}.input_layernorm.weight"]
    out = torch.empty(len(h), heads * d, dtype=torch.float64)
    for head in range(heads):
        parts = []
        for which, norm in enumerate(("query_layernorm.weight", "key_layernorm.weight", None)):
            first = (which * heads + head) * d
            part = x @ w["query_key_value.weight"][first : first + d].T
            if raw["linear_silu"]:
                part = part * part.sigmoid()
            if norm is not None:
                if raw["use_qk_norm"]:
                    part = _normed(part, eps) * w[norm]
                part = _rotated(raw, part, positions)
            parts.append(part)
        q, k, v = parts
        slope = _slope(heads, head) * (1 - (layer - minus) / (raw["num_hidden_layers"] - 1) + 1e-5)
        for t in range(len(h)):
            seen = [math.exp(-slope * (t - j)) * float(q[t] @ k[j]) * v[j] for j in range(t + 1)]
            out[t, head * d : (head + 1) * d] = torch.stack(seen).sum(0) / math.sqrt(d)
    width = heads * d // raw["group_norm_size"]
    normed = torch.cat(
        [_normed(out[:, at : at + width], eps) for at in range(0, heads * d, width)], dim=1
    )
    gate = (x @ w["g_proj.weight"].T).sigmoid()
    return (normed * w["g_norm.weight"] * gate) @ w["dense.weight"].T


def _normed(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _slope(heads: int, head: int) -> float:
    power = 2 ** int(math.log2(heads))
    if head < power:
        return float(2.0 ** (-8 * (head + 1) / power))
    return float(2.0 ** (-4 * (2 * (head - power) + 1) / power))


def _rotated(raw: JSON, x: Tensor, positions: Tensor) -> Tensor:
    """Channel pairs (i, i + width/2) as complex numbers; the table is float32, as in training."""
    if not raw.get("linear_rope", True):
        return x
    width = round(raw["head_dim"] * raw["partial_rotary_factor"])
    steps = torch.arange(0, width, 2, dtype=torch.float32) / width
    angle = positions.to(torch.float32)[:, None] * (1.0 / raw["rope_theta"] ** steps)
    rotation = torch.complex(angle.cos().double(), angle.sin().double())
    pairs = torch.complex(x[:, : width // 2], x[:, width // 2 : width]) * rotation
    return torch.cat((pairs.real, pairs.imag, x[:, width:]), dim=1)


def ranks_hold_their_heads(subject: Subject) -> None:
    """What each of two ranks loads of a linear layer are the rows, channels and columns of its own
    heads: of q, of k and of v, not a half of the three together."""
    spec = read_model(subject.model)
    config = reference_config.read_config(subject.model)
    theirs = reference.load(subject.model, torch.float32).params
    heads, half = config.num_attention_heads, config.num_attention_heads // RANKS
    for rank in range(RANKS):
        local = local_spec(spec, rank, RANKS, expert_parallel=True)
        ours = load_weights(subject.model, local, dtype=torch.float32)
        mine = slice(rank * half, (rank + 1) * half)
        for layer in filter(lambda x: isinstance(x.mixer, LightningSpec), spec.layers):
            at = f"model.layers.{layer.index}.self_attn"
            for name, shape in (
                ("query_key_value", (3, heads, -1, spec.hidden_size)),
                ("g_proj", (1, heads, -1, spec.hidden_size)),
                ("g_norm", (1, heads, -1)),
                ("o_proj", (spec.hidden_size, heads, -1)),
            ):
                whole = theirs[f"{at}.{name}.weight"].view(shape)
                got = ours[f"{at}.{name}.weight"]
                if not torch.equal(got.flatten(), whole[:, mine].flatten()):
                    raise CheckFailed(f"ranks = whole: rank {rank}: {at}.{name} has other heads")
