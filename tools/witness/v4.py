"""DeepSeek V4 as it is trained: batched, whole sequences. Letters: B sequences of T tokens, S
streams, H heads of D channels, M entries, W positions of the window.

A step is compiled in parts, each once for all layers that have it: the whole is too long a graph
to compile in the time that a training takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor, nn
from torch.nn import functional

from trueline.reference import config as facts
from trueline.reference import v4_facts
from trueline.reference.config import Config
from witness.model import (
    Experts,
    Norm,
    Rope,
    Trained,
    precise_linear,
    projection,
    rotate_interleaved,
    select,
    wide,
)
from witness.v4_names import published

HIDDEN = -1e9
"""Score of what is not seen: finite, since the first tokens see no entry at all."""
MOST = 60.0
"""Of an entry's score over the largest of the others: far above what normalised queries and keys
can come to, and their exponentials have sums in float32."""
EXACT = 3
"""Sinkhorn's last iterations, through which gradients flow; the ones before set the scale of rows
and columns, which has hardly any influence left after these."""


def unit_rms(x: Tensor, eps: float) -> Tensor:
    y = wide(x)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate_last(x: Tensor, rope: Rope) -> Tensor:
    plain = x.shape[-1] - 2 * rope[0].shape[-1]
    return torch.cat((x[..., :plain], rotate_interleaved(x[..., plain:], rope)), dim=-1)


def complete(count: int, ratio: int, device: torch.device) -> Tensor:
    """[T, M]: whether the token completes the entry's window or comes behind it."""
    place = torch.arange(count, device=device)
    return torch.arange(count // ratio, device=device) < (place[:, None] + 1) // ratio


class HyperConnection(nn.Module):
    """Streams [B, T, S, D] -> a sub-layer's normalised input [B, T, D], and how its output is
    merged."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        v4 = config.v4_facts
        self.streams, self.iterations = v4.hc_mult, v4.hc_sinkhorn_iters
        self.eps, self.norm_eps = v4.hc_eps, config.rms_norm_eps
        count = self.streams
        self.fn = nn.Parameter(0.01 * torch.randn((2 + count) * count, count * config.hidden_size))
        # each sub-layer begins with a stream of its own, so that they do not stay the same
        own = functional.one_hot(torch.tensor(number % count), count).float()
        into = functional.one_hot(torch.tensor((number + 1) % count), count).float()
        carried = 3.0 * torch.eye(count).flatten()
        self.base = nn.Parameter(torch.cat((2 * own - 1, into, carried)))
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def slower(self) -> dict[int, float]:
        """All streams of a token are its input, four times as many channels as elsewhere."""
        return {id(self.fn): 0.25}

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, carry = self._projected(h).split(
            [self.streams, self.streams, self.streams**2], dim=-1
        )
        bases = self.base.split([self.streams, self.streams, self.streams**2])
        pre = (pre * self.scale[0] + bases[0]).sigmoid() + self.eps
        post = 2 * (post * self.scale[1] + bases[1]).sigmoid()
        carry = (carry * self.scale[2] + bases[2]).unflatten(-1, (self.streams, self.streams))
        x = (pre[..., None] * wide(h)).sum(-2).to(h.dtype)
        return self.norm(x), post, self._sinkhorn(carry)

    def _projected(self, h: Tensor) -> Tensor:
        flat = wide(h).flatten(-2)
        length = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        return wide(functional.linear(h.flatten(-2), self.fn)) * length

    def _sinkhorn(self, logits: Tensor) -> Tensor:
        first = logits.softmax(-1) + self.eps
        first = first / (first.sum(-2, keepdim=True) + self.eps)
        early = max(0, self.iterations - 1 - EXACT)
        with torch.no_grad():
            scaled = self._iterate(first, early)
            scale = scaled / first
        return self._iterate(first * scale, self.iterations - 1 - early)

    def _iterate(self, carry: Tensor, count: int) -> Tensor:
        for _ in range(count):
            carry = carry / (carry.sum(-1, keepdim=True) + self.eps)
            carry = carry / (carry.sum(-2, keepdim=True) + self.eps)
        return carry


class Merge(nn.Module):
    def forward(self, h: Tensor, y: Tensor, post: Tensor, carry: Tensor) -> Tensor:
        """Stream k becomes post_k y + sum_j carry[j, k] h_j."""
        carried = (carry[..., None] * wide(h)[..., None, :]).sum(-3)
        return (post[..., None] * wide(y)[..., None, :] + carried).to(y.dtype)


class HyperHead(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps, self.norm_eps = config.v4_facts.hc_eps, config.rms_norm_eps
        count = config.v4_facts.hc_mult
        self.fn = nn.Parameter(0.01 * torch.randn(count, count * config.hidden_size))
        self.base = nn.Parameter(torch.zeros(count))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, h: Tensor) -> Tensor:
        flat = wide(h).flatten(-2)
        m = precise_linear(unit_rms(flat, self.norm_eps), self.fn)
        pre = (m * self.scale + self.base).sigmoid() + self.eps
        return (pre[..., None] * wide(h)).sum(-2).to(h.dtype)


class Compressor(nn.Module):
    """Hidden states [B, T, .] -> entries [B, M, dim] of windows of `ratio` tokens; those that
    overlap also pool the window before, through the first half of the channels."""

    def __init__(self, config: Config, ratio: int, dim: int, overlap: bool) -> None:
        super().__init__()
        self.ratio, self.dim, self.overlap = ratio, dim, overlap
        width = dim * (2 if overlap else 1)
        self.kv_proj = projection(config.hidden_size, width)
        self.gate_proj = projection(config.hidden_size, width)
        # each channel begins with positions of its own, so that an entry tells its tokens apart
        self.position_bias = nn.Parameter(1.5 * torch.randn(ratio, width))
        self.norm = Norm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        batch, count, _ = x.shape
        entries = count // self.ratio
        shape = (batch, entries, self.ratio, -1)
        x = x[:, : entries * self.ratio]
        u = wide(self.kv_proj(x)).view(shape)
        z = wide(self.gate_proj(x)).view(shape) + self.position_bias
        if self.overlap:
            u, z = self._with_window_before(u, 0.0), self._with_window_before(z, -torch.inf)
        pooled = (z.softmax(2) * u).sum(2)
        table = rope[0][:: self.ratio][:entries], rope[1][:: self.ratio][:entries]
        return rotate_last(self.norm(pooled).to(x.dtype), table)

    def _with_window_before(self, x: Tensor, absent: float) -> Tensor:
        """[B, M, 2 ratio, dim]; the first window has none before it."""
        before, own = x.split(self.dim, dim=-1)
        before = functional.pad(before[:, :-1], (0, 0, 0, 0, 1, 0), value=absent)
        return torch.cat((before, own), dim=2)


class EntryIndexer(nn.Module):
    """Scores [B, T, M] of every entry for every query."""

    def __init__(self, config: Config, ratio: int) -> None:
        super().__init__()
        assert config.q_lora_rank is not None
        v4 = config.v4_facts
        self.heads, self.dim = v4.index_n_heads, v4.index_head_dim
        self.q_b_proj = projection(config.q_lora_rank, self.heads * self.dim)
        self.weights_proj = projection(config.hidden_size, self.heads)
        self.compressor = Compressor(config, ratio, self.dim, overlap=True)

    def forward(self, x: Tensor, latent: Tensor, rope: Rope) -> Tensor:
        q = self.q_b_proj(latent).unflatten(-1, (self.heads, self.dim))
        q = rotate_last(q, (rope[0][:, None], rope[1][:, None]))
        keys = self.compressor(x, rope).to(q.dtype)
        weights = precise_linear(x, self.weights_proj.weight) * self.heads**-0.5
        found = wide(q.flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3]) * self.dim**-0.5
        return (found.relu() * weights[..., None]).sum(2)


class Compressed(nn.Module):
    """Attention over a window and over compressed entries: one softmax, with a sink per head."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        c, v4 = config, config.v4_facts
        assert c.q_lora_rank is not None
        self.heads, self.dim, self.window = c.num_attention_heads, v4.head_dim, v4.sliding_window
        self.form, self.ratio, self.topk = v4.forms[layer], v4.ratios[layer], v4.index_topk
        self.scale, self.eps = v4_facts.softmax_scale(v4), c.rms_norm_eps
        self.q_a_proj = projection(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = Norm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = projection(c.q_lora_rank, self.heads * self.dim)
        self.kv_proj = projection(c.hidden_size, self.dim)
        self.kv_norm = Norm(self.dim, c.rms_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(self.heads))
        inner = self.heads * self.dim // v4.o_groups
        self.o_a_proj = nn.Parameter(torch.randn(v4.o_groups, v4.o_lora_rank, inner) * inner**-0.5)
        self.o_b_proj = projection(v4.o_groups * v4.o_lora_rank, c.hidden_size)
        sparse = self.form == v4_facts.SPARSE
        if self.form != v4_facts.WINDOW:
            self.compressor = Compressor(c, self.ratio, self.dim, overlap=sparse)
        self.indexer = EntryIndexer(c, self.ratio) if sparse else None

    def forward(
        self, x: Tensor, rope: Rope, everything: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """With `everything`, a number of 0 or 1, the indexer is computed: whether all entries are
        seen, or those that it selects. Also its divergence from the attention over entries."""
        latent = self.q_a_layernorm(self.q_a_proj(x))
        q = unit_rms(self.q_b_proj(latent).unflatten(-1, (self.heads, self.dim)), self.eps)
        at_query = rope[0][:, None], rope[1][:, None]
        q = rotate_last(q, at_query)
        kv = rotate_last(self.kv_norm(self.kv_proj(x)), rope).to(q.dtype)
        entries, seen, scores = None, None, None
        if self.form != v4_facts.WINDOW:
            entries = self.compressor(x, rope).to(q.dtype)
            seen = complete(x.shape[1], self.ratio, x.device)[None]
            if everything is not None and self.indexer is not None:
                scores = self.indexer(x.detach(), latent.detach(), rope)
                chosen = select(scores.detach(), seen[0], self.topk)
                seen = seen & (chosen | (everything > 0))
        out, shares = self._attend(q, kv, entries, seen)
        out = rotate_last(out, (at_query[0], -at_query[1])).flatten(2)
        groups = out.unflatten(-1, (len(self.o_a_proj), -1))
        out = self.o_b_proj(torch.einsum("btgi,gri->btgr", groups, self.o_a_proj).flatten(2))
        if scores is None:
            return out, None
        assert seen is not None
        assert shares is not None
        found = scores.masked_fill(~seen, HIDDEN).log_softmax(-1)
        return out, -(shares * found).sum(-1).mean()

    def _attend(
        self, q: Tensor, kv: Tensor, entries: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, H, D]; and the share of each entry [B, T, M] in what all heads look at."""
        count = q.shape[1]
        near = [functional.pad(kv, (0, 0, back, 0))[:, :count] for back in range(self.window)]
        scores = torch.stack([(wide(q) * wide(k)[:, :, None]).sum(-1) for k in near], dim=-1)
        place = torch.arange(count, device=q.device)[:, None]
        absent = place < torch.arange(self.window, device=q.device)
        scores = (scores * self.scale).masked_fill(absent[:, None], HIDDEN)
        sinks = wide(self.sinks)
        # any number gives the same; no entry's, whose maximum Triton failed to compile
        top = torch.maximum(scores.amax(-1), sinks).detach()[..., None]
        far, shares = None, None
        if entries is not None:
            assert seen is not None
            far = wide(q.flatten(1, 2) @ entries.mT).unflatten(1, q.shape[1:3]) * self.scale
            far = far.masked_fill(~seen[:, :, None], HIDDEN)
        weights = (scores - top).exp()
        total = weights.sum(-1) + (sinks - top[..., 0]).exp()
        out = sum(weights[..., back, None] * wide(k)[:, :, None] for back, k in enumerate(near))
        if far is not None:
            assert entries is not None
            looked = (far - top).clamp(max=MOST).exp()
            total = total + looked.sum(-1)
            mixed = looked.to(q.dtype).flatten(1, 2) @ entries
            out = out + wide(mixed).unflatten(1, q.shape[1:3])
            shares = (looked.detach() / total.detach()[..., None]).sum(2)
            shares = shares / shares.sum(-1, keepdim=True).clamp_min(1e-20)
        return (out / total[..., None]).to(q.dtype), shares


class V4Experts(Experts):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, config.shared_expert_width)
        self.limit, self.hashed = config.v4_facts.swiglu_limit, config.v4_facts.hashed[layer]
        if self.hashed:
            del self.bias
            drawn = torch.rand(config.vocab_size, self.count).topk(config.num_experts_per_tok)
            self.register_buffer("table", drawn.indices)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        flat = x.flatten(0, 1)
        scores = functional.softplus(precise_linear(flat, self.gate.weight)).sqrt()
        with torch.no_grad():
            if self.hashed:
                ids = self.table[tokens.flatten()]
            else:
                ids = (scores + self.bias).topk(self.config.num_experts_per_tok).indices
            chosen = torch.zeros_like(scores).scatter(1, ids, 1.0)
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        out = self.mixed(flat, weights * self.config.routed_scaling_factor)
        return out.view(x.shape), None if self.hashed else chosen.mean(0)

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class V4Layer(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.hc_attn = HyperConnection(config, 2 * layer)
        self.attention = Compressed(config, layer)
        self.hc_ffn = HyperConnection(config, 2 * layer + 1)
        self.mlp = V4Experts(config, layer)
        self.merge = Merge()


class V4(Trained):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(V4Layer(c, layer) for layer in range(c.num_hidden_layers))
        self.hc_head = HyperHead(c)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = projection(c.hidden_size, c.vocab_size)
        with torch.no_grad():
            for layer in self.layers:  # residual branches begin small
                layer.attention.o_b_proj.weight.mul_(0.3)
                layer.mlp.down_proj.mul_(0.3)

    @property
    def topk(self) -> int | None:
        return self.config.v4_facts.index_topk

    def compile_for_training(self) -> V4:
        # a part that does not compile runs eagerly, one whose backward does not likewise: left to
        # the first backward pass, that would end the training
        torch._dynamo.config.suppress_errors = True
        torch._functorch.config.force_non_lazy_backward_lowering = True
        for layer in self.layers:
            for part in layer.children():
                part.compile()
        self.hc_head.compile()
        return self

    def ropes(self, count: int, device: torch.device) -> tuple[Rope, Rope]:
        """Of layers with a window alone, and of the others; where there are none, nobody looks."""
        alone = [form == v4_facts.WINDOW for form in self.config.v4_facts.forms]

        def table(of_window: bool) -> Rope:
            layer = alone.index(of_window) if of_window in alone else 0
            frequencies = facts.v4_inverse_frequencies(self.config, layer)
            angles = torch.arange(count).float()[:, None] * frequencies
            return angles.cos().to(device), angles.sin().to(device)

        return table(True), table(False)

    def forward(self, tokens: Tensor, ropes: tuple[Rope, Rope]) -> tuple[Tensor, Tensor]:
        """Logits, and how often each expert of each layer was chosen; every entry is seen."""
        logits, loads, _ = self._run(tokens, ropes, None)
        return logits, loads

    def forward_sparse(
        self, tokens: Tensor, ropes: tuple[Rope, Rope], everything: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Also the divergence of the indexers: see `Compressed`."""
        return self._run(tokens, ropes, everything)

    def _run(
        self, tokens: Tensor, ropes: tuple[Rope, Rope], everything: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        h = self.embed_tokens(tokens)
        divergence, loads = wide(h).new_zeros(()), []
        h = h[:, :, None].expand(-1, -1, self.config.v4_facts.hc_mult, -1)
        for layer in self.layers:
            x, post, carry = layer.hc_attn(h)
            rope = ropes[0] if layer.attention.form == v4_facts.WINDOW else ropes[1]
            # a layer without an indexer is then compiled once
            indexed = everything if layer.attention.indexer is not None else None
            y, of_indexer = layer.attention(x, rope, indexed)
            h = layer.merge(h, y, post, carry)
            if of_indexer is not None:
                divergence = divergence + of_indexer
            x, post, carry = layer.hc_ffn(h)
            y, load = layer.mlp(x, tokens)
            h = layer.merge(h, y, post, carry)
            if load is not None:
                loads.append(load)
        return self.lm_head(self.norm(self.hc_head(h))), torch.stack(loads), divergence

    def stored_dtype(self, name: str) -> torch.dtype:
        if name.endswith("tid2eid"):
            return torch.int64
        precise = "hc_" in name or name.endswith(("attn_sink", "ape", "gate.bias"))
        return torch.float32 if precise else torch.bfloat16

    def published(self) -> Iterator[tuple[str, Tensor]]:
        return published(self)
