"""One program per token. Experts are chosen by repeatedly taking the largest of whole numbers that
hold the score and the index: equal scores have an order, and NaN cannot lead anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from trueline.ops.launch import num_sms, power_of_two, unit_stride
from trueline.ops.linear import LinearOp
from trueline.ops.linear.triton import FEW_ROWS, LONGEST, streamed
from trueline.ops.route import IMPLEMENTATIONS, kernels
from trueline.spec.feedforward import RouterSpec

capabilities = IMPLEMENTATIONS["triton"]

# Split-K: each number of splits has its own kernel that adds them up.
SPLITS = (16, 4, 1)


@dataclass(frozen=True, slots=True)
class RouteLaunch:
    """Tiles and split-K of the router's GEMM."""

    rows: int
    columns: int
    inner: int
    depth: int
    """Channels of one program; the parts are added up where experts are chosen."""
    warps: int = 4
    stages: int = 3


def launch(tokens: int, experts: int, hidden: int, dtype: torch.dtype, sms: int) -> RouteLaunch:
    rows = min(max(power_of_two(tokens), 16), 64)
    columns = min(max(power_of_two(experts), 16), 32 if tokens <= 64 else 64)
    inner = 64
    if dtype == torch.float32:
        rows, columns, inner = min(rows, 32), 32, 32
    tiles = triton.cdiv(tokens, rows) * triton.cdiv(experts, columns)
    splits = next(n for n in SPLITS if n == 1 or n * tiles <= sms)
    return RouteLaunch(rows, columns, inner, triton.cdiv(hidden, splits * inner) * inner)


def pack(weight: Tensor, dtype: torch.dtype, linear: LinearOp) -> Tensor:
    """[parts, experts, hidden] in x's dtype, which add up to the weight exactly: one part where the
    checkpoint has no more digits than x. Products of two such numbers are exact in float32, and run
    on tensor cores. Where three parts do not suffice, the weight as it is."""
    rest = weight.float()
    parts: list[Tensor] = []
    while len(parts) < 3 and (not parts or bool(rest.any())):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.stack(parts) if not bool(rest.any()) else weight.float()[None].contiguous()


def choose(
    x: Tensor,
    packed: Tensor,
    linear: LinearOp,
    bias: Tensor | None,
    router: RouterSpec,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    parts, experts, hidden = packed.shape
    if len(x) <= FEW_ROWS and hidden <= LONGEST:
        logits = x.new_empty(parts, len(x), experts, dtype=torch.float32)
        streamed(x[:, None].expand(-1, parts, -1), packed, logits.transpose(0, 1))
        return _chosen(logits, bias, router, forced)
    how = launch(len(x), experts, hidden, packed.dtype, num_sms(x.device))
    return choose_with(how, x, packed, bias, router, forced)


def choose_with(
    how: RouteLaunch,
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    router: RouterSpec,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    x = unit_stride(x)
    parts, experts, hidden = packed.shape
    splits = triton.cdiv(hidden, how.depth)
    logits = torch.empty(splits, len(x), experts, device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(len(x), how.rows), triton.cdiv(experts, how.columns), splits)
    kernels.split_gemm[grid](
        *(x, x.stride(0), packed, logits, len(x), hidden, experts, how.depth),
        PARTS=parts,
        BLOCK_M=how.rows,
        BLOCK_N=how.columns,
        BLOCK_K=how.inner,
        num_warps=how.warps,
        num_stages=how.stages,
    )
    return _chosen(logits, bias, router, forced)


def run(
    logits: Tensor, bias: Tensor | None, router: RouterSpec, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _chosen(logits.contiguous()[None], bias, router, forced)


def _chosen(
    logits: Tensor, bias: Tensor | None, router: RouterSpec, forced: Tensor | None
) -> tuple[Tensor, Tensor]:
    """From [parts, tokens, experts], which add up to the logits."""
    parts, tokens, experts = logits.shape
    top, size = router.top_k, experts // router.num_groups
    ids = forced
    if ids is None:
        ids = torch.empty(tokens, top, device=logits.device, dtype=torch.int64)
    weights = torch.empty(tokens, top, device=logits.device, dtype=torch.float32)
    kernels.choose[(tokens,)](
        *(logits, tokens * experts, bias, ids.contiguous(), ids, weights, router.scaling_factor),
        PARTS=parts,
        SCORING=router.scoring,
        BIAS=bias is not None,
        FORCED=forced is not None,
        GROUPS=router.num_groups,
        SIZE=size,
        KEPT=router.top_groups,
        PAIR=router.group_score == "top2_sum" and size > 1,
        TOP=top,
        RENORMALISE=router.renormalise,
        BLOCK_G=power_of_two(router.num_groups),
        BLOCK_S=power_of_two(size),
        BLOCK_T=power_of_two(top),
        num_warps=1,
    )
    return ids, weights
