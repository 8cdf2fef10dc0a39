"""Mistakes in loading, caught by the ledger and by the reference's own loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from trueline.models import deepseek
from trueline.models import parameters as parameter_table
from trueline.reference import weights as reference_weights
from trueline.spec.feedforward import MoESpec
from trueline.spec.fields import Fields
from trueline.spec.parameters import Parameter
from trueline.spec.source import formula
from trueline.verify.faults import Fault, Make, Rewriting
from trueline.weights import ledger as ledger_module
from trueline.weights import load
from trueline.weights import value as value_module
from trueline.weights.formats import block_fp8
from trueline.weights.formats.block_fp8 import Fp8Stored
from trueline.weights.value import Weight

Pair = tuple[int, int]
"""Of rows and of columns."""
Method: TypeAlias = "classmethod[Weight, [Sequence[Weight], int], Weight]"


def _dequantise(change: Callable[..., Tensor]) -> Make:
    """`change` gets numbers, scales, the place of each row and column among them, and the block."""

    def broken(numbers: Tensor, scales: Tensor, first: Pair, block: Pair) -> Tensor:
        rows, columns = (
            torch.arange(at, at + size) for at, size in zip(first, numbers.shape, strict=True)
        )
        return change(numbers.float(), scales, rows, columns, block)

    return lambda _: broken


def _guessed_block(weight: Tensor, scale: Tensor, rows: Tensor, columns: Tensor, _: Pair) -> Tensor:
    """The block side inferred as size / number of scales (576 / 5 = 116)."""
    side = [max(len(n) // s, 1) for n, s in zip((rows, columns), scale.shape, strict=True)]
    at = [(n // d).clamp_max(s - 1)
          for n, d, s in zip((rows, columns), side, scale.shape, strict=True)]  # fmt: skip
    return weight * scale[at[0]][:, at[1]]


def _whole_blocks_only(
    weight: Tensor, scale: Tensor, rows: Tensor, columns: Tensor, block: Pair
) -> Tensor:
    """Numbers of a partial block at the edge get the scale of the last whole one."""
    last = [max(len(n) // side - 1, 0) for n, side in zip((rows, columns), block, strict=True)]
    at = [(n // side).clamp_max(most)
          for n, side, most in zip((rows, columns), block, last, strict=True)]  # fmt: skip
    return weight * scale[at[0]][:, at[1]]


def _next(columns: Tensor, block: int, count: int) -> Tensor:
    return ((columns + 1) // block).clamp_max(count - 1)


def _scales_cut_across(original: Make) -> Make:
    """A cut of columns takes rows of the scales, and the other way round."""

    def broken(self: Fp8Stored, axis: int, start: int, stop: int) -> Fp8Stored:
        cut: Fp8Stored = original(self, axis, start, stop)
        transposed = replace(self, scales=self.scales.T)
        scales = original(transposed, axis, start, stop).scales.T
        grid = [-(-(at + n) // b) for at, n, b in zip(cut.first, cut.shape, cut.block, strict=True)]
        at = [torch.arange(n).clamp_max(m - 1) for n, m in zip(grid, scales.shape, strict=True)]
        return replace(cut, scales=scales[at[0]][:, at[1]])

    return broken


def _cuts_begin_blocks(original: Make) -> Make:
    return lambda *given: replace(original(*given), first=(0, 0))


def _merged(original: Method) -> Method:
    """Numbers and scales of two weights are concatenated alike, wherever the first one ends."""

    def broken(cls: type[Weight], weights: Sequence[Weight], axis: int = 0) -> Weight:
        right = original.__func__(cls, weights, axis)
        stored = [part.stored for weight in weights for part in weight.parts]
        fp8 = [each for each in stored if isinstance(each, Fp8Stored)]
        if len(fp8) < len(stored):
            return right
        numbers, scales = (
            torch.cat([getattr(each, name) for each in fp8], axis) for name in ("numbers", "scales")
        )
        one = replace(fp8[0], numbers=numbers, scales=scales)
        return replace(right, parts=(replace(right.parts[0], stored=one),))

    return classmethod(broken)


def _ignored_by_part(_: Make) -> Make:
    return lambda storage, weight: any(entry in weight for entry in storage.ignored_modules)


def _swapped_gate_and_up(original: Make) -> Make:
    def broken(moe: MoESpec, *rest: object) -> Iterator[Parameter]:
        for parameter in original(moe, *rest):
            if not parameter.name.endswith("gate_up_proj"):
                yield parameter
                continue
            width = moe.expert_width.count
            pieces = [
                replace(p, put=(p.put[0], slice((p.put[1].start + width) % (2 * width),
                                                (p.put[1].start + width) % (2 * width) + width)))
                for p in parameter.pieces
            ]  # fmt: skip
            yield replace(parameter, pieces=tuple(pieces))

    return broken


def _mtp_not_skipped(original: Make) -> Make:
    def broken(spec: object, name: str) -> object:
        reason = original(spec, name)
        return None if reason and "MTP" in reason else reason

    return broken


def _everything_skipped(_: Make) -> Make:
    return lambda spec, name: "not needed, surely"


WEIGHT_FAULTS = [
    Fault("fp8-divided", "weight_scale_inv taken at its name: divided", "ledger", "fp8",
          block_fp8, "dequantise",
          _dequantise(lambda w, s, r, c, b: w / s[r // b[0]][:, c // b[1]])),
    Fault("fp8-no-scale", "fp8 weights without their scales", "ledger", "fp8",
          block_fp8, "dequantise", _dequantise(lambda w, s, r, c, b: w)),
    Fault("fp8-guessed-block", "block side inferred from a ratio", "ledger", "fp8",
          block_fp8, "dequantise", _dequantise(_guessed_block)),
    Fault("fp8-one-scale-a-row", "scales of the first block column for all", "ledger", "fp8",
          block_fp8, "dequantise", _dequantise(lambda w, s, r, c, b: w * s[r // b[0]][:, :1])),
    Fault("fp8-ignored-by-part", "the ignore list matches parts of names", "ledger", "fp8-exempt",
          block_fp8.BlockFp8, "exempts", _ignored_by_part),
    Fault("fp8-partial-block", "a partial edge block gets its neighbour's scale", "ledger", "fp8",
          block_fp8, "dequantise", _dequantise(_whole_blocks_only)),
    Fault("fp8-scale-transposed", "scales of blocks column by column", "ledger", "fp8",
          block_fp8, "dequantise",
          _dequantise(lambda w, s, r, c, b: w * s.T.reshape(s.shape)[r // b[0]][:, c // b[1]])),
    Fault("fp8-block-edge", "the last column of a block has the next one's scale", "ledger", "fp8",
          block_fp8, "dequantise",
          _dequantise(lambda w, s, r, c, b: w * s[r // b[0]][:, _next(c, b[1], s.shape[1])])),
    Fault("fp8-scales-to-powers", "scales to the nearest powers of two", "ledger", "fp8",
          block_fp8, "dequantise",
          _dequantise(lambda w, s, r, c, b: w * s.log2().round().exp2()[r // b[0]][:, c // b[1]])),
    Fault("fp8-cut-across", "scales cut along the other axis", "weight values", "fp8",
          block_fp8.Fp8Stored, "cut", _scales_cut_across),
    Fault("fp8-cut-on-edges", "a cut is taken to begin where a block does", "weight values", "fp8",
          block_fp8.Fp8Stored, "cut", _cuts_begin_blocks),
    Fault("fp8-concat-merged", "after concat, rows get the scale of a neighbour block",
          "weight values", "fp8", value_module.Weight, "concat", _merged),
    Fault("experts-swapped", "up rows before gate rows in the stacked experts", "ledger", "v3",
          parameter_table, "_moe", _swapped_gate_and_up),
    Fault("prefix-lost", "K2.5's weight prefix is not known", "ledger", "k25",
          ledger_module, "published_name", lambda _: lambda spec, stored: stored),
    Fault("mtp-as-main", "the MTP layer is not skipped", "ledger", "v3-mtp",
          ledger_module, "unused_by_choice", _mtp_not_skipped),
    Fault("leftovers-ignored", "tensors that nobody takes are skipped silently", "strict", "v3",
          ledger_module, "unused_by_choice", _everything_skipped),
    Fault("gaps-ignored", "missing tensors are not noticed", "strict", "v3",
          ledger_module.Ledger, "balanced", lambda _: property(lambda ledger: True)),
    Fault("unread-keys-ignored", "config keys that nobody reads are dropped", "strict", "v3",
          Fields, "finish", lambda _: lambda self, harmless: None),
    Fault("bias-bf16", "the correction bias is rounded to bfloat16", "ledger", "bf16",
          load, "FLOAT32_KINDS", lambda _: ()),
    Fault("tie-ignored", "tie_word_embeddings is ignored", "ledger", "tied",
          deepseek, "ModelSpec",
          lambda original: Rewriting(original, tied_embeddings=formula(False, "guessed"))),
    Fault("reference-fp8-transposed", "the reference's own scales transposed", "ledger",
          "fp8", reference_weights, "dequantise",
          lambda original: lambda w, s, b: original(w, s.flip(0), b)),
]  # fmt: skip
