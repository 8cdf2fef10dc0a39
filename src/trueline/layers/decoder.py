"""The skeleton that every family shares: embed, (norm, mix, add, norm, feed forward, add) × layers,
norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from trueline.cache.kinds import LayerViews
from trueline.layers.context import Build, FeedForward, Mixer, Rope, StepInput, Weights
from trueline.ops.rope import table
from trueline.spec.feedforward import FeedForwardSpec
from trueline.spec.mixer import MixerSpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.spec.rope import RopeSpec
from trueline.weights.value import Weight


def make(spec: MixerSpec | FeedForwardSpec, build: Build, weights: Weights, name: str) -> object:
    """The layer that the plan has chosen for this kind of spec."""
    return build.plan.layer(spec.label)(spec, build, weights, name)


class Ropes:
    """One table for all layers that rotate alike. Every position once, exactly float32: rows are
    looked up, never computed again."""

    def __init__(self, spec: ModelSpec, max_position: int, device: torch.device) -> None:
        self.different: list[RopeSpec] = []
        ropes = [layer.mixer.rotation for layer in spec.layers]
        for rope in ropes:
            if rope is not None and rope not in self.different:
                self.different.append(rope)
        self.of_layer = [None if rope is None else self.different.index(rope) for rope in ropes]
        places = torch.arange(max_position)
        # on the CPU wherever they are used: another device has another cosine
        made = (table(rope, places) for rope in self.different)
        self.tables = [(cos.to(device), sin.to(device)) for cos, sin in made]

    def at(self, positions: Tensor) -> list[Rope]:
        """Per layer, the rows of these positions."""
        rows = [(cos[positions], sin[positions]) for cos, sin in self.tables]
        return [None if index is None else rows[index] for index in self.of_layer]


class Layer:
    def __init__(self, spec: LayerSpec, build: Build, weights: Weights) -> None:
        name = f"model.layers.{spec.index}"
        self.index = spec.index
        self.mixer_norm = weights.take(f"{name}.input_layernorm.weight")
        self.forward_norm = weights.take(f"{name}.post_attention_layernorm.weight")
        self.mixer = cast("Mixer", make(spec.mixer, build, weights, f"{name}.self_attn"))
        self.feed_forward = cast(
            "FeedForward", make(spec.feed_forward, build, weights, f"{name}.mlp")
        )


class Decoder:
    def __init__(self, spec: ModelSpec, build: Build, weights: Weights) -> None:
        self.spec, self.ops, self.collective = spec, build.ops, build.collective
        embedding = weights.stored("model.embed_tokens.weight").dequantise()
        tied = spec.tied_embeddings
        head: Weight | Tensor = embedding if tied else weights.stored("lm_head.weight")
        self.embedding = embedding
        self.compute = build.plan.compute_dtype
        self.layers = [Layer(layer, build, weights) for layer in spec.layers]
        self.norm = weights.take("model.norm.weight")
        self.head = self.ops.linear.pack(head)
        self.ropes = Ropes(spec, build.plan.max_model_len, build.plan.device.torch)
        if weights.left():
            raise AssertionError(f"parameters that no layer took: {weights.left()[:4]}")

    def hidden(self, step: StepInput, views: Sequence[LayerViews]) -> Tensor:
        """[n, hidden], before the final norm."""
        ropes = self.ropes.at(step.positions)
        h = self._embed(step.tokens)
        norm, eps = self.ops.rms_norm.run_sum, self.spec.norm_eps
        y: Tensor | None = None
        for layer, view, rope in zip(self.layers, views, ropes, strict=True):
            if y is None:
                x = self.ops.rms_norm.run(h, layer.mixer_norm, eps)
            else:
                h, x = norm(h, y, layer.mixer_norm, eps)
            h, x = norm(h, layer.mixer.forward(x, step, view, rope), layer.forward_norm, eps)
            choice = step.forced.experts.get(layer.index) if step.forced else None
            y, ids = layer.feed_forward.forward(x, choice)
            if step.recorded is not None and ids is not None:
                step.recorded.experts[layer.index] = ids
        assert y is not None, "a model has layers"
        return h + y

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary], float32."""
        x = self.ops.rms_norm.run(hidden, self.norm, self.spec.norm_eps)
        # Rounded to 16 bits, logits would often be equal.
        mine = self.ops.linear.run_wide(x, self.head)
        return mine if self._holds_all_words() else self.collective.all_gather(mine, 1)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._holds_all_words():
            return self.embedding[tokens].to(self.compute)
        words = self.spec.vocab
        mine = (tokens >= words.start) & (tokens < words.stop)
        rows = self.embedding[(tokens - words.start).clamp(0, words.count - 1)].to(self.compute)
        return self.collective.all_reduce(rows * mine[:, None])

    def _holds_all_words(self) -> bool:
        return self.spec.vocab.is_whole
