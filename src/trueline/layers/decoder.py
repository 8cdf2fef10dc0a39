"""The skeleton that every family shares: embed, (norm, mix, add, norm, feed forward, add) × layers,
norm, head."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.layers.context import Build, StepInput, Weights
from trueline.layers.feedforward import Dense, MoE
from trueline.layers.mla import MLA
from trueline.ops.rope import table
from trueline.plan import uniform_mixer
from trueline.spec.feedforward import MoESpec
from trueline.spec.mixer import MLASpec
from trueline.spec.model import LayerSpec, ModelSpec

Replay = dict[int, Tensor]
"""Layer -> expert ids [n, top_k]: recorded, or forced."""


class Layer:
    def __init__(self, spec: LayerSpec, build: Build, weights: Weights) -> None:
        name = f"model.layers.{spec.index}"
        self.index = spec.index
        self.mixer_norm = weights.take(f"{name}.input_layernorm.weight")
        self.forward_norm = weights.take(f"{name}.post_attention_layernorm.weight")
        assert isinstance(spec.mixer, MLASpec)
        self.mixer = MLA(spec.mixer, build, weights, f"{name}.self_attn")
        self.feed_forward: Dense | MoE
        if isinstance(spec.feed_forward, MoESpec):
            self.feed_forward = MoE(spec.feed_forward, build, weights, f"{name}.mlp")
        else:
            self.feed_forward = Dense(spec.feed_forward, build, weights, f"{name}.mlp")


class Decoder:
    def __init__(self, spec: ModelSpec, build: Build, weights: Weights) -> None:
        self.spec, self.ops, self.collective = spec, build.ops, build.collective
        embedding = weights.take("model.embed_tokens.weight")
        head = embedding if spec.tied_embeddings else weights.take("lm_head.weight")
        self.embedding = embedding
        self.layers = [Layer(layer, build, weights) for layer in spec.layers]
        self.norm = weights.take("model.norm.weight")
        self.head = self.ops.linear.pack(head)
        mixer = uniform_mixer(spec)
        # Every position once, exactly float32: rows are looked up, never computed again.
        self.rope = table(mixer.rope, torch.arange(build.plan.max_model_len))
        if weights.left():
            raise AssertionError(f"parameters that no layer took: {weights.left()[:4]}")

    def hidden(
        self,
        step: StepInput,
        views: list[LatentView],
        recorded: Replay | None = None,
        forced: Replay | None = None,
    ) -> Tensor:
        """[n, hidden], before the final norm."""
        cos, sin = self.rope
        rope = (cos[step.positions], sin[step.positions])
        h = self._embed(step.tokens)
        norm, eps = self.ops.rms_norm.run, self.spec.norm_eps
        for layer, view in zip(self.layers, views, strict=True):
            h = h + layer.mixer.forward(norm(h, layer.mixer_norm, eps), step, view, rope)
            choice = forced.get(layer.index) if forced else None
            y, ids = layer.feed_forward.forward(norm(h, layer.forward_norm, eps), choice)
            if recorded is not None and ids is not None:
                recorded[layer.index] = ids
            h = h + y
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary], float32."""
        x = self.ops.rms_norm.run(hidden, self.norm, self.spec.norm_eps)
        mine = self.ops.linear.run(x, self.head).float()
        return mine if self._holds_all_words() else self.collective.join(mine, 1)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._holds_all_words():
            return self.embedding[tokens]
        words = self.spec.vocab
        mine = (tokens >= words.start) & (tokens < words.stop)
        rows = self.embedding[(tokens - words.start).clamp(0, words.count - 1)]
        return self.collective.add(rows * mine[:, None])

    def _holds_all_words(self) -> bool:
        return self.spec.vocab.count == self.spec.vocab.total
