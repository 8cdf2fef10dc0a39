"""The models as they are trained: batched, whole sequences, compiled. Facts come from the
reference's reading of config.json; the arithmetic is written here again, for speed.

Experts are computed densely: all of them for every token, those not chosen with weight zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from trueline.reference import bailing
from trueline.reference import config as facts
from trueline.reference.config import Config

Rope = tuple[Tensor, Tensor]


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = wide(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def projection(wide: int, narrow: int) -> nn.Linear:
    made = nn.Linear(wide, narrow, bias=False)
    nn.init.normal_(made.weight, std=wide**-0.5)
    return made


def precise_linear(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(wide(x), wide(weight))


def rotate_interleaved(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Indexer(nn.Module):
    """Scores [B, T, T] of every key for every query."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.q_lora_rank is not None
        index = config.indexer_facts
        self.heads, self.dim = index.index_n_heads, index.index_head_dim
        self.rotated, self.interleaved = config.qk_rope_head_dim, index.interleaved
        self.wq_b = projection(config.q_lora_rank, self.heads * self.dim)
        self.wk = projection(config.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = projection(config.hidden_size, self.heads)

    def forward(self, x: Tensor, q_latent: Tensor, rope: Rope) -> Tensor:
        batch, count, _ = x.shape
        q = self.wq_b(q_latent).view(batch, count, self.heads, self.dim)
        k = self.k_norm(self.wk(x)).to(q.dtype)
        q = self._rotate(q, (rope[0][:, None], rope[1][:, None]))
        k = self._rotate(k, rope)
        weights = precise_linear(x, self.weights_proj.weight) * self.heads**-0.5
        scores = wide(torch.einsum("bthd,bsd->bths", q, k)) * self.dim**-0.5
        return (scores.relu() * weights[..., None]).sum(2)

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        rotate = rotate_interleaved if self.interleaved else rotate_halves
        return torch.cat((rotate(x[..., : self.rotated], rope), x[..., self.rotated :]), dim=-1)


class Latent(nn.Module):
    def __init__(self, config: Config, indexer: bool) -> None:
        super().__init__()
        c = self.config = config
        assert c.q_lora_rank is not None
        self.scale = facts.softmax_scale(c)
        width = c.qk_nope_head_dim + c.qk_rope_head_dim
        heads = c.num_attention_heads
        self.q_a_proj = projection(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = Norm(c.q_lora_rank, c.latent_norm_eps)
        self.q_b_proj = projection(c.q_lora_rank, heads * width)
        # mscale² makes scores larger: queries begin, and move, by as much less
        self.query_rate = width**-0.5 / self.scale
        with torch.no_grad():
            self.q_b_proj.weight.mul_(self.query_rate)
        self.kv_a_proj_with_mqa = projection(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, c.latent_norm_eps)
        self.kv_b_proj = projection(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = projection(heads * c.v_head_dim, c.hidden_size)
        self.indexer = Indexer(c) if indexer else None

    def slower(self) -> dict[int, float]:
        """By the id of a parameter, its share of the learning rate."""
        return {id(self.q_b_proj.weight): self.query_rate}

    def heads(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v [B, H, T, .] and the normalised query latent."""
        c, (batch, count, _) = self.config, x.shape
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).view(batch, count, c.num_attention_heads, -1)
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        k_nope, v = kv.view(batch, count, c.num_attention_heads, -1).split(
            [c.qk_nope_head_dim, c.v_head_dim], dim=-1
        )
        q_pe = rotate_interleaved(q_pe, (rope[0][:, None], rope[1][:, None]))
        k_pe = rotate_interleaved(k_pe, rope)[:, :, None].expand_as(q_pe)
        q, k = torch.cat((q_nope, q_pe), -1), torch.cat((k_nope, k_pe.to(k_nope.dtype)), -1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), q_latent

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None = None) -> Tensor:
        q, k, v, _ = self.heads(x, rope)
        short = q.shape[-1] - v.shape[-1]
        out = functional.scaled_dot_product_attention(
            q, k, functional.pad(v, (0, short)), mask, is_causal=mask is None, scale=self.scale
        )
        out = out[..., : v.shape[-1]].transpose(1, 2).flatten(2)
        return self.o_proj(out)

    def probabilities(self, x: Tensor, rope: Rope, seen: Tensor) -> Tensor:
        """[B, T, T], the mean of all heads: what an indexer is to find."""
        q, k, _, _ = self.heads(x, rope)
        scores = wide(q @ k.mT) * self.scale
        return scores.masked_fill(~seen, float("-inf")).softmax(-1).mean(1)


class Linear(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        c, linear = config, config.linear_facts
        self.heads, self.dim = c.num_attention_heads, linear.head_dim
        self.rotated, self.groups = linear.rotary_dim, linear.group_norm_size
        wide = self.heads * self.dim
        self.query_key_value = projection(c.hidden_size, 3 * wide)
        self.query_layernorm = Norm(self.dim, c.rms_norm_eps)
        self.key_layernorm = Norm(self.dim, c.rms_norm_eps)
        self.g_proj = projection(c.hidden_size, wide)
        self.g_norm = Norm(wide, c.rms_norm_eps)
        self.dense = projection(wide, c.hidden_size)
        slopes = bailing.slopes(linear, self.heads, c.num_hidden_layers, layer)
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        batch, count, _ = x.shape
        q, k, v = self.query_key_value(x).view(batch, count, 3, self.heads, self.dim).unbind(2)
        table = rope[0][:, None], rope[1][:, None]
        q = self._rotate(self.query_layernorm(q), table) * self.dim**-0.5
        k = self._rotate(self.key_layernorm(k), table)
        q, k, v = (each.transpose(1, 2).to(v.dtype) for each in (q, k, v))
        place = torch.arange(count, device=x.device)
        distance = place[:, None] - place
        decay = torch.exp(-self.slopes[:, None, None] * distance.clamp_min(0)) * (distance >= 0)
        out = ((q @ k.mT) * decay.to(q.dtype)) @ v
        out = out.transpose(1, 2).flatten(2)
        normed = functional.rms_norm(
            wide(out).view(batch, count, self.groups, -1), [out.shape[-1] // self.groups],
            eps=self.g_norm.eps,
        ).flatten(2)  # fmt: skip
        gated = (normed * self.g_norm.weight).to(out.dtype) * self.g_proj(x).sigmoid()
        return self.dense(gated)

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        return torch.cat((rotate_halves(x[..., : self.rotated], rope), x[..., self.rotated :]), -1)


class Dense(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = projection(size, width), projection(size, width)
        self.down_proj = projection(width, size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)), None


class Experts(nn.Module):
    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        c = self.config = config
        assert c.n_routed_experts is not None
        assert c.n_shared_experts == 1
        self.count = c.n_routed_experts
        size = c.hidden_size
        # the last one is the shared expert
        shape = (self.count + 1, width, size)
        self.gate_proj = nn.Parameter(torch.randn(shape) * size**-0.5)
        self.up_proj = nn.Parameter(torch.randn(shape) * size**-0.5)
        self.down_proj = nn.Parameter(torch.randn(shape[0], size, width) * width**-0.5)
        self.gate = projection(size, self.count)
        self.register_buffer("bias", torch.zeros(self.count))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        shape = x.shape
        x = x.flatten(0, 1)
        chosen, weights = self.route(x)
        return self.mixed(x, weights).view(shape), chosen.float().mean(0)

    def mixed(self, x: Tensor, weights: Tensor) -> Tensor:
        """Tokens [N, .] through all experts, by their weights, and through the shared one."""
        weights = torch.cat((weights, torch.ones_like(weights[:, :1])), dim=1)
        gate = functional.linear(x, self.gate_proj.flatten(0, 1)).unflatten(1, (self.count + 1, -1))
        up = functional.linear(x, self.up_proj.flatten(0, 1)).unflatten(1, (self.count + 1, -1))
        inner = self.activation(gate, up) * weights[..., None].to(gate.dtype)
        return functional.linear(inner.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        scores = precise_linear(x, self.gate.weight).sigmoid()
        with torch.no_grad():
            choice = scores + self.bias
            if c.n_group > 1:
                groups = choice.view(len(x), c.n_group, -1).topk(2, dim=-1).values.sum(-1)
                kept = torch.zeros_like(groups).scatter(1, groups.topk(c.topk_group).indices, 1.0)
                out = kept.repeat_interleave(self.count // c.n_group, dim=1) == 0
                choice = choice.masked_fill(out, float("-inf"))
            ids = choice.topk(c.num_experts_per_tok).indices
            chosen = torch.zeros_like(scores).scatter(1, ids, 1.0)
        weights = scores * chosen
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * c.routed_scaling_factor


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int, dense_width: int) -> None:
        super().__init__()
        c = config
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.linear = facts.layer_is_linear(c, layer)
        own = c.indexer is not None and not c.indexer.shared[layer]
        self.attention = Linear(c, layer) if self.linear else Latent(c, indexer=own)
        self.mlp: nn.Module
        if facts.layer_is_moe(c, layer):
            self.mlp = Experts(c, c.shared_expert_width)
        else:
            self.mlp = Dense(c.hidden_size, dense_width)


class Trained(nn.Module):
    """What every model has for its checkpoint."""

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Its weights under their published names."""
        raise NotImplementedError

    def stored_dtype(self, name: str) -> torch.dtype:
        raise NotImplementedError

    def take(self, tensors: dict[str, Tensor]) -> None:
        """The other way; indexers that are not there stay as they are."""
        with torch.no_grad():
            for name, own in self.published():
                if name in tensors:
                    own.copy_(tensors[name])
                elif ".indexer." not in name:
                    raise KeyError(name)


class Model(Trained):
    def __init__(self, config: Config, dense_width: int) -> None:
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(
            Layer(c, layer, dense_width) for layer in range(c.num_hidden_layers)
        )
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = projection(c.hidden_size, c.vocab_size)
        with torch.no_grad():
            # residual branches begin small
            for layer in self.layers:
                out = layer.attention.dense if layer.linear else layer.attention.o_proj
                out.weight.mul_(0.3)
                down = layer.mlp.down_proj
                (down if isinstance(down, nn.Parameter) else down.weight).mul_(0.3)

    @property
    def topk(self) -> int | None:
        """Keys that a query sees; None: every one before it."""
        return None if self.config.indexer is None else self.config.indexer.index_topk

    def compile_for_training(self) -> Callable[[Tensor, tuple[Rope, Rope]], tuple[Tensor, Tensor]]:
        return torch.compile(self)

    def ropes(self, count: int, device: torch.device) -> tuple[Rope, Rope]:
        def table(frequencies: Tensor) -> Rope:
            angles = torch.arange(count).float()[:, None] * frequencies
            scale = facts.cos_sin_scale(self.config)
            return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)

        latent = table(facts.inverse_frequencies(self.config))
        if self.config.linear is None:
            return latent, latent
        return latent, table(facts.linear_inverse_frequencies(self.config))

    def forward(self, tokens: Tensor, ropes: tuple[Rope, Rope]) -> tuple[Tensor, Tensor]:
        """Logits, and how often each expert of each layer was chosen."""
        h, loads = self.embed_tokens(tokens), []
        for layer in self.layers:
            x = layer.input_layernorm(h)
            h = h + layer.attention(x, ropes[1] if layer.linear else ropes[0])
            out, load = layer.mlp(layer.post_attention_layernorm(h))
            h = h + out
            if load is not None:
                loads.append(load)
        return self.lm_head(self.norm(h)), torch.stack(loads)

    def forward_sparse(
        self, tokens: Tensor, ropes: tuple[Rope, Rope], everything: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each layer sees what its indexer selects; or `everything`, a number of 0 or 1 that does
        not make the compiler begin again. Also the divergence of the indexers from the attention
        of the layers that use them, over what those see."""
        h, loads = self.embed_tokens(tokens), []
        count, topk = tokens.shape[1], self.config.indexer_facts.index_topk
        causal = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
        divergence = h.new_zeros(())
        scores, seen = None, causal[None]
        for layer in self.layers:
            x = layer.input_layernorm(h)
            attention = layer.attention
            if attention.indexer is not None:
                q_latent = attention.q_a_layernorm(attention.q_a_proj(x))
                scores = attention.indexer(x.detach(), q_latent.detach(), ropes[0])
                seen = causal & (select(scores.detach(), causal, topk) | (everything > 0))
            with torch.no_grad():
                wanted = attention.probabilities(x, ropes[0], seen[:, None])
            assert scores is not None
            found = scores.masked_fill(~seen, float("-inf")).log_softmax(-1)
            found = found.masked_fill(~seen, 0.0)
            divergence = divergence - (wanted * found).sum(-1).mean()
            h = h + attention(x, ropes[0], seen[:, None])
            out, load = layer.mlp(layer.post_attention_layernorm(h))
            h = h + out
            if load is not None:
                loads.append(load)
        return self.lm_head(self.norm(h)), torch.stack(loads), divergence

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Ling's names where it is Ling's."""
        ling, prefix = self.config.linear is not None, "model.layers"
        embedding = "word_embeddings" if ling else "embed_tokens"
        yield f"model.{embedding}.weight", self.embed_tokens.weight
        yield "model.norm.weight", self.norm.weight
        yield "lm_head.weight", self.lm_head.weight
        for number, layer in enumerate(self.layers):
            at = f"{prefix}.{number}"
            yield f"{at}.input_layernorm.weight", layer.input_layernorm.weight
            yield f"{at}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight
            for name, tensor in layer.attention.named_parameters():
                renamed = name.replace("o_proj", "dense") if ling else name
                yield f"{at}.{'attention' if ling else 'self_attn'}.{renamed}", tensor
            if isinstance(layer.mlp, Dense):
                for name, tensor in layer.mlp.named_parameters():
                    yield f"{at}.mlp.{name}", tensor
                continue
            yield f"{at}.mlp.gate.weight", layer.mlp.gate.weight
            bias = "expert_bias" if ling else "e_score_correction_bias"
            yield f"{at}.mlp.gate.{bias}", layer.mlp.bias
            for name in ("gate_proj", "up_proj", "down_proj"):
                stacked = getattr(layer.mlp, name)
                for expert in range(layer.mlp.count):
                    yield f"{at}.mlp.experts.{expert}.{name}.weight", stacked[expert]
                yield f"{at}.mlp.shared_experts.{name}.weight", stacked[-1]

    def stored_dtype(self, name: str) -> torch.dtype:
        precise = name.endswith(("e_score_correction_bias", "expert_bias"))
        return torch.float32 if precise else torch.bfloat16


def select(scores: Tensor, causal: Tensor, topk: int) -> Tensor:
    """[B, T, T]: each row's best `topk`; of equal scores the lowest position wins."""
    count = scores.shape[-1]
    if count <= topk:
        return causal[None].expand_as(scores)
    hidden = scores.masked_fill(~causal, float("-inf"))
    threshold = hidden.topk(topk, dim=-1).values[..., -1:]
    above = hidden > threshold
    equal = (hidden == threshold) & causal
    room = topk - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room)) | (causal & (threshold == -math.inf))
