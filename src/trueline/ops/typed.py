"""For mypy alone: every implementation of ours has the signatures that its op's Protocol asks for.
Nobody imports it; imported, it would load what only a machine with a GPU has."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from trueline.ops.batched_gemm import BatchedGemm
    from trueline.ops.batched_gemm import cpu as batched_gemm_cpu
    from trueline.ops.batched_gemm import cublas as batched_gemm_cublas
    from trueline.ops.batched_gemm import native as batched_gemm_native
    from trueline.ops.batched_gemm import reference as batched_gemm_reference
    from trueline.ops.batched_gemm import triton as batched_gemm_triton
    from trueline.ops.compress import Compress, CompressInto
    from trueline.ops.compress import cpu as compress_cpu
    from trueline.ops.compress import reference as compress_reference
    from trueline.ops.compress import triton as compress_triton
    from trueline.ops.experts import Experts, InvariantExperts, SharedExperts
    from trueline.ops.experts import cpu as experts_cpu
    from trueline.ops.experts import hopper_w4a16 as experts_hopper_w4a16
    from trueline.ops.experts import native as experts_native
    from trueline.ops.experts import reference as experts_reference
    from trueline.ops.experts import triton as experts_triton
    from trueline.ops.gated_norm import GatedNorm
    from trueline.ops.gated_norm import composed as gated_norm_composed
    from trueline.ops.gated_norm import reference as gated_norm_reference
    from trueline.ops.gated_norm import triton as gated_norm_triton
    from trueline.ops.hyper_connections import HyperConnections
    from trueline.ops.hyper_connections import cpu as hyper_connections_cpu
    from trueline.ops.hyper_connections import native as hyper_connections_native
    from trueline.ops.hyper_connections import reference as hyper_connections_reference
    from trueline.ops.hyper_connections import triton as hyper_connections_triton
    from trueline.ops.index_scores import IndexScores
    from trueline.ops.index_scores import cpu as index_scores_cpu
    from trueline.ops.index_scores import native as index_scores_native
    from trueline.ops.index_scores import reference as index_scores_reference
    from trueline.ops.index_scores import triton as index_scores_triton
    from trueline.ops.index_write import IndexWrite
    from trueline.ops.index_write import composed as index_write_composed
    from trueline.ops.index_write import reference as index_write_reference
    from trueline.ops.index_write import triton as index_write_triton
    from trueline.ops.latent_write import LatentWrite
    from trueline.ops.latent_write import composed as latent_write_composed
    from trueline.ops.latent_write import reference as latent_write_reference
    from trueline.ops.latent_write import triton as latent_write_triton
    from trueline.ops.lightning import LightningAttention
    from trueline.ops.lightning import cpu as lightning_cpu
    from trueline.ops.lightning import reference as lightning_reference
    from trueline.ops.lightning import triton as lightning_triton
    from trueline.ops.linear import Linear
    from trueline.ops.linear import cublas as linear_cublas
    from trueline.ops.linear import native as linear_native
    from trueline.ops.linear import onednn as linear_onednn
    from trueline.ops.linear import reference as linear_reference
    from trueline.ops.linear import torch_mm as linear_torch_mm
    from trueline.ops.linear import triton as linear_triton
    from trueline.ops.mla_decode import MLADecode
    from trueline.ops.mla_decode import cpu as mla_decode_cpu
    from trueline.ops.mla_decode import hopper as mla_decode_hopper
    from trueline.ops.mla_decode import native as mla_decode_native
    from trueline.ops.mla_decode import reference as mla_decode_reference
    from trueline.ops.mla_decode import triton as mla_decode_triton
    from trueline.ops.mla_prefill import MaskedPrefill, MLAPrefill
    from trueline.ops.mla_prefill import cpu as mla_prefill_cpu
    from trueline.ops.mla_prefill import hopper as mla_prefill_hopper
    from trueline.ops.mla_prefill import reference as mla_prefill_reference
    from trueline.ops.mla_prefill import triton as mla_prefill_triton
    from trueline.ops.mlp import MLP, InvariantMLP
    from trueline.ops.mlp import cpu as mlp_cpu
    from trueline.ops.mlp import native as mlp_native
    from trueline.ops.mlp import reference as mlp_reference
    from trueline.ops.mlp import triton as mlp_triton
    from trueline.ops.qkv_prepare import QKVPrepare
    from trueline.ops.qkv_prepare import composed as qkv_prepare_composed
    from trueline.ops.qkv_prepare import reference as qkv_prepare_reference
    from trueline.ops.qkv_prepare import triton as qkv_prepare_triton
    from trueline.ops.rms_norm import RMSNorm
    from trueline.ops.rms_norm import cpu as rms_norm_cpu
    from trueline.ops.rms_norm import native as rms_norm_native
    from trueline.ops.rms_norm import reference as rms_norm_reference
    from trueline.ops.rms_norm import triton as rms_norm_triton
    from trueline.ops.rope import Rope
    from trueline.ops.rope import cpu as rope_cpu
    from trueline.ops.rope import native as rope_native
    from trueline.ops.rope import reference as rope_reference
    from trueline.ops.rope import triton as rope_triton
    from trueline.ops.route import Route
    from trueline.ops.route import cpu as route_cpu
    from trueline.ops.route import native as route_native
    from trueline.ops.route import reference as route_reference
    from trueline.ops.route import triton as route_triton
    from trueline.ops.row_rounding import RowRounding
    from trueline.ops.row_rounding import composed as row_rounding_composed
    from trueline.ops.row_rounding import reference as row_rounding_reference
    from trueline.ops.row_rounding import triton as row_rounding_triton
    from trueline.ops.sampling import CapturedSampling, Sampling
    from trueline.ops.sampling import cpu as sampling_cpu
    from trueline.ops.sampling import reference as sampling_reference
    from trueline.ops.sampling import triton as sampling_triton
    from trueline.ops.sink_attention import SinkAttention
    from trueline.ops.sink_attention import cpu as sink_attention_cpu
    from trueline.ops.sink_attention import native as sink_attention_native
    from trueline.ops.sink_attention import reference as sink_attention_reference
    from trueline.ops.sink_attention import triton as sink_attention_triton
    from trueline.ops.sink_prepare import SinkPrepare
    from trueline.ops.sink_prepare import composed as sink_prepare_composed
    from trueline.ops.sink_prepare import reference as sink_prepare_reference
    from trueline.ops.sink_prepare import triton as sink_prepare_triton
    from trueline.ops.sparse_mla import SparseMLA
    from trueline.ops.sparse_mla import cpu as sparse_mla_cpu
    from trueline.ops.sparse_mla import hopper as sparse_mla_hopper
    from trueline.ops.sparse_mla import native as sparse_mla_native
    from trueline.ops.sparse_mla import reference as sparse_mla_reference
    from trueline.ops.sparse_mla import triton as sparse_mla_triton
    from trueline.ops.topk import TopK
    from trueline.ops.topk import cpu as topk_cpu
    from trueline.ops.topk import native as topk_native
    from trueline.ops.topk import reference as topk_reference
    from trueline.ops.topk import triton as topk_triton

    First = TypeVar("First")
    """What an implementation packs or prepares: each has its own type."""
    Second = TypeVar("Second")

    def linear(op: Linear[First]) -> None: ...

    def batched_gemm(op: BatchedGemm[First]) -> None: ...

    def mlp(op: MLP[First]) -> None: ...

    def mla_decode(op: MLADecode[First]) -> None: ...

    def mla_prefill(op: MLAPrefill[First]) -> None: ...

    def lightning(op: LightningAttention[First, Second]) -> None: ...

    def index_scores(op: IndexScores[First]) -> None: ...

    def sparse_mla(op: SparseMLA[First]) -> None: ...

    def compress(op: Compress[First]) -> None: ...

    def compress_into(op: CompressInto[First]) -> None: ...

    def sink_attention(op: SinkAttention[First]) -> None: ...

    def route(op: Route[First]) -> None: ...

    def experts(op: Experts[First]) -> None: ...

    def invariant_mlp(op: InvariantMLP[First]) -> None: ...

    def invariant_experts(op: InvariantExperts[First]) -> None: ...

    def shared_experts(op: SharedExperts[First]) -> None: ...

    def masked_prefill(op: MaskedPrefill[First]) -> None: ...

    linear(linear_native)
    linear(linear_onednn)
    linear(linear_torch_mm)
    linear(linear_reference)
    linear(linear_triton)
    linear(linear_cublas)
    batched_gemm(batched_gemm_native)
    batched_gemm(batched_gemm_cpu)
    batched_gemm(batched_gemm_reference)
    batched_gemm(batched_gemm_triton)
    batched_gemm(batched_gemm_cublas)
    mlp(mlp_native)
    mlp(mlp_cpu)
    mlp(mlp_reference)
    mlp(mlp_triton)
    rms_norm: tuple[RMSNorm, ...] = (
        rms_norm_native,
        rms_norm_cpu,
        rms_norm_reference,
        rms_norm_triton,
    )
    rope: tuple[Rope, ...] = (
        rope_native,
        rope_cpu,
        rope_reference,
        rope_triton,
    )
    latent_write: tuple[LatentWrite, ...] = (
        latent_write_composed,
        latent_write_reference,
        latent_write_triton,
    )
    mla_decode(mla_decode_native)
    mla_decode(mla_decode_cpu)
    mla_decode(mla_decode_reference)
    mla_decode(mla_decode_hopper)
    mla_decode(mla_decode_triton)
    mla_prefill(mla_prefill_cpu)
    mla_prefill(mla_prefill_reference)
    mla_prefill(mla_prefill_hopper)
    mla_prefill(mla_prefill_triton)
    lightning(lightning_cpu)
    lightning(lightning_reference)
    lightning(lightning_triton)
    index_write: tuple[IndexWrite, ...] = (
        index_write_composed,
        index_write_reference,
        index_write_triton,
    )
    qkv_prepare: tuple[QKVPrepare, ...] = (
        qkv_prepare_composed,
        qkv_prepare_reference,
        qkv_prepare_triton,
    )
    gated_norm: tuple[GatedNorm, ...] = (
        gated_norm_composed,
        gated_norm_reference,
        gated_norm_triton,
    )
    sink_prepare: tuple[SinkPrepare, ...] = (
        sink_prepare_composed,
        sink_prepare_reference,
        sink_prepare_triton,
    )
    hyper_connections: tuple[HyperConnections, ...] = (
        hyper_connections_native,
        hyper_connections_cpu,
        hyper_connections_reference,
        hyper_connections_triton,
    )
    index_scores(index_scores_native)
    index_scores(index_scores_cpu)
    index_scores(index_scores_reference)
    index_scores(index_scores_triton)
    topk: tuple[TopK, ...] = (
        topk_native,
        topk_cpu,
        topk_reference,
        topk_triton,
    )
    sparse_mla(sparse_mla_native)
    sparse_mla(sparse_mla_cpu)
    sparse_mla(sparse_mla_reference)
    sparse_mla(sparse_mla_hopper)
    sparse_mla(sparse_mla_triton)
    compress(compress_cpu)
    compress(compress_reference)
    compress_into(compress_triton)
    sink_attention(sink_attention_native)
    sink_attention(sink_attention_cpu)
    sink_attention(sink_attention_reference)
    sink_attention(sink_attention_triton)
    route(route_native)
    route(route_cpu)
    route(route_reference)
    route(route_triton)
    row_rounding: tuple[RowRounding, ...] = (
        row_rounding_triton,
        row_rounding_composed,
        row_rounding_reference,
    )
    experts(experts_native)
    experts(experts_cpu)
    experts(experts_reference)
    experts(experts_hopper_w4a16)
    experts(experts_triton)
    sampling: tuple[Sampling, ...] = (
        sampling_cpu,
        sampling_reference,
        sampling_triton,
    )
    invariant_mlp(mlp_native)
    invariant_mlp(mlp_cpu)
    invariant_mlp(mlp_reference)
    invariant_experts(experts_native)
    invariant_experts(experts_cpu)
    invariant_experts(experts_reference)
    shared_experts(experts_triton)
    masked_prefill(mla_prefill_hopper)
    masked_prefill(mla_prefill_triton)
    captured_sampling: CapturedSampling = sampling_triton
