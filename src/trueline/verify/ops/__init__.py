"""What every implementation of an op must pass, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from trueline.cache.layout import LatentLayout
from trueline.ops.capabilities import Capabilities, Context
from trueline.ops.registry import OPS, capabilities, implementation, runnable
from trueline.verify import sparse
from trueline.verify.cases import Subject
from trueline.verify.ops import (
    attention,
    basic,
    clamped,
    compress,
    fp8_inputs,
    hyper_connections,
    index,
    latent,
    latent_fp8,
    lightning,
    linear_layer,
    ranks,
    rope_contract,
    row_rounding,
    sampling,
    sink,
    sink_prepare,
    stored,
)
from trueline.verify.ops.data import SMALL, WIDE, Dims, H, L, R, paged, randn

__all__ = [
    "FP8_CHECKS",
    "OP_CHECKS",
    "H",
    "L",
    "OpCheck",
    "R",
    "attention_ops",
    "fp8_attention_ops",
    "fp8_input_ops",
    "paged",
    "randn",
    "v4_ops",
]


@dataclass(frozen=True)
class OpCheck:
    what: str
    run: Callable[..., None]
    """Takes the implementation (and a dtype, if other than float32 is asked for), and raises
    CheckFailed with the evidence."""
    invariant: bool = False
    """Asks for what only batch-invariant mode needs: an implementation may refuse that mode."""
    stored: bool = False
    """Packs weights as they are stored. Others pack plain numbers, which an implementation for
    some formats does not take."""
    dims: tuple[int, Dims] | None = None
    """Heads and dims of latent attention, which an implementation may refuse."""

    def fits(self, declared: Capabilities) -> bool:
        """Of OP_CHECKS: whether an implementation is asked for it."""
        return "weights" in declared.numerics and (self.stored or declared.formats is None)

    def refused(self, declared: Capabilities, context: Context) -> list[str]:
        """By an implementation that runs in this context, at the dims of this check."""
        if self.dims is None:
            return []
        heads, dims = self.dims
        layout = LatentLayout(*dims.cached, 16)
        return declared.refusals(replace(context, heads=dims.heads(heads), latent=layout))


ODD, REAL = (H, SMALL), (128, WIDE)
OP_CHECKS: Mapping[str, tuple[OpCheck, ...]] = {
    "linear": (
        OpCheck("numbers", basic.linear),
        OpCheck("stored", stored.linear, stored=True),
        OpCheck("bits", basic.linear_bits, True),
        OpCheck("ranks", ranks.linear, True),
    ),
    "batched_gemm": (
        OpCheck("numbers", basic.batched_gemm),
        OpCheck("stored", stored.batched_gemm, stored=True),
        OpCheck("bits", basic.batched_gemm_bits, True),
        OpCheck("ranks", ranks.batched_gemm, True),
    ),
    "mlp": (
        OpCheck("numbers", basic.mlp),
        OpCheck("clamped", clamped.mlp),
        OpCheck("bits", basic.mlp_bits, True),
        OpCheck("ranks", ranks.mlp, True),
    ),
    "rms_norm": (OpCheck("numbers", basic.rms_norm),),
    "rope": (
        OpCheck("numbers", basic.rope),
        OpCheck("contract", rope_contract.keeps_its_arguments),
    ),
    "latent_write": (
        OpCheck("numbers", latent.latent_write),
        OpCheck("fp8", latent_fp8.latent_write),
    ),
    "mla_decode": (
        OpCheck("numbers", attention.mla_decode, dims=ODD),
        OpCheck("real dims", attention.mla_decode_wide, dims=REAL),
        OpCheck("natural lse", attention.natural_lse, dims=ODD),
        OpCheck("fp8", latent_fp8.mla_decode, dims=ODD),
        OpCheck("bits", attention.mla_decode_bits, True, dims=ODD),
        OpCheck("fp8 bits", latent_fp8.mla_decode_bits, True, dims=ODD),
        OpCheck("ranks", ranks.mla_decode, True, dims=ODD),
    ),
    "mla_prefill": (
        OpCheck("numbers", attention.mla_prefill, dims=ODD),
        OpCheck("real dims", attention.mla_prefill_wide, dims=REAL),
        OpCheck("near ties", attention.mla_prefill_ties, dims=REAL),
        OpCheck("fp8", latent_fp8.mla_prefill, dims=ODD),
    ),
    "lightning": (
        OpCheck("any cuts", lightning.any_cuts),
        OpCheck("any decay", lightning.any_decay),
        OpCheck("slots", lightning.free_slots),
        OpCheck("fixed form", lightning.fixed_form, True),
        OpCheck("bits", lightning.fixed_bits, True),
        OpCheck("ranks", ranks.lightning, True),
    ),
    "index_write": (OpCheck("numbers", index.index_write), OpCheck("queries", index.index_rotate)),
    "qkv_prepare": (OpCheck("numbers", linear_layer.qkv_prepare),),
    "gated_norm": (OpCheck("numbers", linear_layer.gated_norm),),
    "hyper_connections": (
        OpCheck("numbers", hyper_connections.hyper_connections),
        OpCheck("bits", hyper_connections.bits, True),
    ),
    "index_scores": (OpCheck("numbers", sparse.index_scores),),
    "topk": (OpCheck("choices", sparse.topk),),
    "sparse_mla": (
        OpCheck("numbers", sparse.sparse_mla, dims=ODD),
        OpCheck("real dims", sparse.sparse_mla_wide, dims=REAL),
        OpCheck("fp8", latent_fp8.sparse_mla, dims=ODD),
        OpCheck("ranks", ranks.sparse_mla, True, dims=ODD),
    ),
    "compress": (
        OpCheck("numbers", compress.compress),
        OpCheck("real dims", compress.compress_wide),
        OpCheck("bits", compress.compress_bits, True),
    ),
    "sink_prepare": (
        OpCheck("numbers", sink_prepare.sink_prepare),
        OpCheck("bits", sink_prepare.bits, True),
    ),
    "sink_attention": (
        OpCheck("numbers", sink.sink_attention),
        OpCheck("real dims", sink.sink_attention_wide),
        OpCheck("bits", sink.sink_attention_bits, True),
        OpCheck("ranks", ranks.sink_attention, True),
    ),
    "row_rounding": (
        OpCheck("numbers", row_rounding.row_rounding),
        OpCheck("bits", row_rounding.row_rounding_bits, True),
    ),
    "route": (OpCheck("choices", basic.route),),
    "experts": (
        OpCheck("numbers", basic.experts),
        OpCheck("clamped", clamped.experts),
        OpCheck("stored", stored.experts, stored=True),
        OpCheck("ranks", ranks.experts, True),
    ),
    "sampling": (
        OpCheck("definition", sampling.sampling),
        OpCheck("penalties", sampling.penalties),
        OpCheck("scores", sampling.scores),
        OpCheck("batch", sampling.alone_or_together),
    ),
}


FP8_CHECKS: Mapping[str, tuple[OpCheck, ...]] = {
    "linear": (
        OpCheck("fp8 inputs", fp8_inputs.linear),
        OpCheck("fp8 inputs, bits", fp8_inputs.linear_bits, True),
    ),
    "mlp": (
        OpCheck("fp8 inputs", fp8_inputs.mlp),
        OpCheck("fp8 inputs, bits", fp8_inputs.mlp_bits, True),
    ),
    "experts": (
        OpCheck("fp8 inputs", fp8_inputs.experts),
        OpCheck("fp8 inputs, bits", fp8_inputs.experts_bits, True),
    ),
}
"""Of implementations that declare the numerics `activations`."""


def attention_ops(subject: Subject) -> None:
    """Latent attention in every implementation that runs here."""
    for op in ("mla_decode", "mla_prefill"):
        for name in runnable(op, torch.float32):
            OP_CHECKS[op][0].run(implementation(op, name))


def fp8_attention_ops(subject: Subject) -> None:
    """The same over a cache in fp8, and what writes it."""
    for op in ("latent_write", "mla_decode", "mla_prefill"):
        check = next(check for check in OP_CHECKS[op] if check.what == "fp8")
        for name in runnable(op, torch.float32):
            if name != "reference":
                check.run(implementation(op, name))


def fp8_input_ops(subject: Subject) -> None:
    """Products whose inputs go through fp8, in every implementation for CPUs."""
    for op, (numbers, _) in FP8_CHECKS.items():
        for name in OPS[op]:
            declared = capabilities(op, name)
            if "activations" in declared.numerics and "cpu" in declared.devices:
                numbers.run(implementation(op, name))


V4_OPS = {
    "hyper_connections": "numbers",
    "mlp": "clamped",
    "experts": "clamped",
    "route": "choices",
    "row_rounding": "numbers",
}


def v4_ops(subject: Subject) -> None:
    """What DeepSeek-V4 has outside attention, and what its own code rounds, in every implementation
    that runs here."""
    for op, what in V4_OPS.items():
        check = next(check for check in OP_CHECKS[op] if check.what == what)
        for name in runnable(op, torch.float32):
            check.run(implementation(op, name))
