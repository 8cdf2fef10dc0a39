"""The skeleton that every family shares: embed, (norm, mix, add, norm, feed forward, add) × layers,
norm, head. What a sub-layer reads of the residual and how its output goes back is residual.py's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from trueline.cache.kinds import LayerViews
from trueline.layers.context import (
    Build,
    FeedForward,
    HashedExperts,
    Mixer,
    StepInput,
    Weights,
)
from trueline.layers.residual import Residual, residual_for
from trueline.parallel.placement import Divided, Partial, Replicated, check_shape
from trueline.spec.feedforward import FeedForwardSpec, MoESpec
from trueline.spec.mixer import MixerSpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.weights.value import Weight


def make(spec: MixerSpec | FeedForwardSpec, build: Build, weights: Weights, name: str) -> object:
    """The layer that the plan has chosen for this kind of spec."""
    return build.plan.layer(spec.label)(spec, build, weights, name)


class Layer:
    def __init__(self, spec: LayerSpec, build: Build, weights: Weights, residual: Residual) -> None:
        name = f"model.layers.{spec.index}"
        self.index = spec.index
        self.before_mixer = residual.entry(weights, f"{name}.input_layernorm", f"{name}.hc_attn")
        self.before_forward = residual.entry(
            weights, f"{name}.post_attention_layernorm", f"{name}.hc_ffn"
        )
        self.mixer = cast("Mixer", make(spec.mixer, build, weights, f"{name}.self_attn"))
        self.feed_forward = cast(
            "FeedForward", make(spec.feed_forward, build, weights, f"{name}.mlp")
        )
        moe = spec.feed_forward
        self.hashed: HashedExperts | None = None
        if isinstance(moe, MoESpec) and moe.router.hashed:
            self.hashed = cast("HashedExperts", self.feed_forward)

    def choice(self, step: StepInput) -> Tensor | None:
        """Experts [n, top_k] that are not the router's to choose: recorded ones, or a table's."""
        if step.forced is not None and self.index in step.forced.experts:
            return step.forced.experts[self.index]
        return self.hashed.hashed(step.tokens) if self.hashed else None


class Decoder:
    def __init__(self, spec: ModelSpec, build: Build, weights: Weights) -> None:
        self.spec, self.ops, self.collective = spec, build.ops, build.collective
        embedding = weights.stored("model.embed_tokens.weight").dequantise()
        tied = spec.tied_embeddings
        head: Weight | Tensor = embedding if tied else weights.stored("lm_head.weight")
        for what, part in (("embed_tokens", embedding), ("lm_head", head)):
            check_shape(what, tuple(part.shape), spec.vocab.count, spec.hidden_size)
        self.embedding = embedding
        self.compute = build.plan.compute_dtype
        self.residual = residual_for(spec, build, weights)
        self.layers = [Layer(layer, build, weights, self.residual) for layer in spec.layers]
        self.norm = weights.take("model.norm.weight")
        self.head = self.ops.linear.pack(head)
        self.ropes = build.ropes
        if weights.left():
            raise AssertionError(f"parameters that no layer took: {weights.left()[:4]}")

    def hidden(self, step: StepInput, views: Sequence[LayerViews]) -> Tensor:
        """[n, hidden], before the final norm."""
        ropes = self.ropes.at(step.positions)
        stream = self.residual.start(self._embed(step.tokens))
        for layer, view, rope in zip(self.layers, views, ropes, strict=True):
            x = Replicated(stream.read(layer.before_mixer))
            stream.add(layer.mixer.forward(x, step, view, rope))
            x = Replicated(stream.read(layer.before_forward))
            y, ids = layer.feed_forward.forward(x, layer.choice(step))
            stream.add(y)
            if step.recorded is not None and ids is not None:
                step.recorded.experts[layer.index] = ids
        return stream.end()

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary], float32."""
        x = self.ops.rms_norm.run(hidden, self.norm, self.spec.norm_eps)
        # Rounded to 16 bits, logits would often be equal.
        mine = self.ops.linear.run_wide(x, self.head)
        return mine if self._holds_all_words() else self.collective.all_gather(Divided(mine), 1)

    def _embed(self, tokens: Tensor) -> Replicated:
        if self._holds_all_words():
            return Replicated(self.embedding[tokens].to(self.compute))
        words = self.spec.vocab
        mine = (tokens >= words.start) & (tokens < words.stop)
        rows = self.embedding[(tokens - words.start).clamp(0, words.count - 1)].to(self.compute)
        return self.collective.all_reduce(Partial(rows * mine[:, None]))

    def _holds_all_words(self) -> bool:
        return self.spec.vocab.is_whole
