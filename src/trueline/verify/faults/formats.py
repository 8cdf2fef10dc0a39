"""Mistakes in packed formats, caught by comparison with the reference's own reading, by cuts of
weights and by what must be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trueline.reference import quantised as reference_quantised
from trueline.reference import weights as reference_weights
from trueline.verify.faults import Fault, Make
from trueline.weights import load
from trueline.weights.checkpoint import StoredTensor
from trueline.weights.formats import Format, Stored, block_fp8, fp4, pack_int4
from trueline.weights.formats.fp4 import Fp4Stored
from trueline.weights.formats.pack_int4 import Int4Stored
from trueline.weights.rank_ledger import Wanted

Nibbles = Callable[[Tensor], Tensor]
"""From packed words or bytes to the nibbles of each."""
IN_ORDER = tuple(range(8))
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (*fp4.CODES, *(-code for code in fp4.CODES))


def _words(order: Sequence[int]) -> Nibbles:
    bits = torch.tensor([4 * place for place in order], dtype=torch.int32)
    return lambda packed: ((packed[:, :, None] >> bits) & 15).flatten(1)


def _bytes(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).int()


def _times(numbers: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return numbers * scales[:, groups]


def _transposed(numbers: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """Scales taken to be stored group by group."""
    return numbers * scales.T.reshape(scales.shape)[:, groups]


def _divided(numbers: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return numbers / scales[:, groups]


def _next_at_the_edge(numbers: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """The last column of a group gets the next group's scale."""
    after = torch.cat((groups[1:], groups[-1:]))
    return numbers * scales[:, after]


def _int4(
    order: Sequence[int] = IN_ORDER,
    number: Callable[[Tensor], Tensor] = lambda nibbles: nibbles - 8,
    scaled: Callable[..., Tensor] = _times,
) -> Make:
    def broken(stored: Int4Stored) -> Tensor:
        columns = torch.arange(stored.first, stored.first + stored.columns)
        numbers = number(_words(order)(stored.packed)[:, columns]).float()
        return scaled(numbers, stored.scales.float(), columns // stored.group)

    return lambda _: broken


def _fp4(
    nibbles: Nibbles = _bytes,
    codes: Sequence[float] = E2M1,
    bias: int = 127,
    scaled: Callable[..., Tensor] = _times,
) -> Make:
    def broken(stored: Fp4Stored) -> Tensor:
        columns = torch.arange(stored.first, stored.first + stored.columns)
        numbers = torch.tensor(codes)[nibbles(stored.packed)[:, columns]]
        scales = torch.exp2(stored.scales.float() - bias)
        return scaled(numbers, scales, columns // stored.group)

    return lambda _: broken


def _high_first(packed: Tensor) -> Tensor:
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1).int()


def _cuts_begin_groups(original: Make) -> Make:
    return lambda *given: replace(original(*given), first=0)


def _scales_not_cut(original: Make) -> Make:
    """A cut of columns keeps the scales of the first ones (vLLM#41511)."""

    def broken(stored: Int4Stored, axis: int, start: int, stop: int) -> Int4Stored:
        cut: Int4Stored = original(stored, axis, start, stop)
        count = cut.scales.shape[1]
        return replace(cut, scales=stored.scales[:, :count]) if axis == 1 else cut

    return broken


def _scales_of_the_last(original: Make) -> Make:
    """Each weight gets the scales of the one of its shape that was opened before it."""
    last: dict[object, Tensor] = {}

    def broken(fmt: Format, tensors: Sequence[StoredTensor], values: Sequence[Tensor]) -> Stored:
        numbers, scales, *rest = values
        before = last.get(scales.shape, scales)
        last[scales.shape] = scales
        opened: Stored = original(fmt, tensors, (numbers, before, *rest))
        return opened

    return broken


def _doubled_e8m0(original: Make) -> Make:
    def broken(fmt: Format, tensors: Sequence[StoredTensor], values: Sequence[Tensor]) -> Stored:
        numbers, scales = values
        e8m0 = scales.dtype == torch.float8_e8m0fnu
        opened: Stored = original(fmt, tensors, (numbers, scales.float() * (2 if e8m0 else 1)))
        return opened

    return broken


def _swapped_in(label: str) -> Make:
    """Gate and up trade places where they are stored in one format."""

    def make(original: Make) -> Make:
        def broken(files: object, wanted: Wanted) -> Iterator[tuple[Stored, object]]:
            for stored, put in original(files, wanted):
                if wanted.use.format.label != label or len(put) < 2:
                    yield stored, put
                    continue
                width = stored.shape[0]
                start = (put[1].start + width) % (2 * width)
                yield stored, (put[0], slice(start, start + width))

        return broken

    return make


def _never(_: Make) -> Make:
    return lambda *given: False


FORMAT_FAULTS = [
    Fault("int4-nibble-order", "the first number of a word in its highest bits", "ledger", "int4",
          Int4Stored, "dequantise", _int4(order=IN_ORDER[::-1])),
    Fault("int4-awq-order", "words in the order that AWQ packs them", "ledger", "int4",
          Int4Stored, "dequantise", _int4(order=AWQ)),
    Fault("int4-zero-point-7", "nibbles less 7", "ledger", "int4",
          Int4Stored, "dequantise", _int4(number=lambda nibbles: nibbles - 7)),
    Fault("int4-twos-complement", "nibbles as signed integers", "ledger", "int4",
          Int4Stored, "dequantise", _int4(number=lambda nibbles: (nibbles ^ 8) - 8)),
    Fault("int4-scale-transposed", "scales group by group, not row by row", "ledger", "int4",
          Int4Stored, "dequantise", _int4(scaled=_transposed)),
    Fault("int4-scale-inverted", "int4 divided by its scales", "ledger", "int4",
          Int4Stored, "dequantise", _int4(scaled=_divided)),
    Fault("int4-group-edge", "the last column of a group has the next one's scale", "ledger",
          "int4", Int4Stored, "dequantise", _int4(scaled=_next_at_the_edge)),
    Fault("int4-group-guessed", "groups of 128 columns, as most checkpoints have", "one-spec",
          "int4", pack_int4, "_read_group",
          lambda original: lambda section: replace(original(section), value=128)),
    Fault("int4-cut-on-edges", "a cut is taken to begin where a group does", "weight values",
          "int4-all", Int4Stored, "cut", _cuts_begin_groups),
    Fault("int4-scales-not-cut", "a cut of columns keeps the first ones' scales", "weight values",
          "int4-all", Int4Stored, "cut", _scales_not_cut),
    Fault("int4-scales-of-another", "an expert has the scales of another one", "ledger", "k25-int4",
          pack_int4.PackInt4, "open", _scales_of_the_last),
    Fault("int4-gate-up-swapped", "up before gate, in int4 experts only", "ledger", "int4",
          load, "opened", _swapped_in("int4")),
    Fault("int4-ignored-by-part", "the ignore list matches parts of names", "ledger", "int4",
          pack_int4.PackInt4, "exempts", lambda _: lambda fmt, weight: "gate" in weight),
    Fault("int4-ignored-quantised", "an ignored layer may be quantised all the same", "strict",
          "int4", pack_int4.PackInt4, "exempts", _never),
    Fault("fp8-ignored-quantised", "an exempt layer may be quantised all the same", "strict",
          "fp8-exempt", block_fp8.BlockFp8, "exempts", _never),
    Fault("fp8-scales-of-another", "an expert has the fp8 scales of another one", "ledger", "fp8",
          block_fp8.BlockFp8, "open", _scales_of_the_last),
    Fault("fp8-gate-up-swapped", "up before gate, in fp8 experts only", "ledger", "fp8",
          load, "opened", _swapped_in("block fp8")),
    Fault("fp8-exponent-bias", "e8m0 scales of block fp8 with a bias of 126", "ledger", "fp4",
          block_fp8.BlockFp8, "open", _doubled_e8m0),
    Fault("fp4-nibble-order", "the even column in the high nibble", "ledger", "fp4",
          Fp4Stored, "dequantise", _fp4(nibbles=_high_first)),
    Fault("fp4-exponent-bias", "e8m0 with a bias of 128", "ledger", "fp4",
          Fp4Stored, "dequantise", _fp4(bias=128)),
    Fault("fp4-codes-as-integers", "codes taken for integers", "ledger", "fp4",
          Fp4Stored, "dequantise", _fp4(codes=(*range(8), *range(0, -8, -1)))),
    Fault("fp4-sign-lost", "bit 3 of a code ignored", "ledger", "fp4",
          Fp4Stored, "dequantise", _fp4(codes=2 * fp4.CODES)),
    Fault("fp4-scale-transposed", "fp4 scales group by group, not row by row", "ledger", "fp4",
          Fp4Stored, "dequantise", _fp4(scaled=_transposed)),
    Fault("fp4-scale-inverted", "fp4 divided by its scales", "ledger", "fp4",
          Fp4Stored, "dequantise", _fp4(scaled=_divided)),
    Fault("fp4-group-edge", "fp4: the last column of a group has the next one's scale", "ledger",
          "fp4", Fp4Stored, "dequantise", _fp4(scaled=_next_at_the_edge)),
    Fault("fp4-cut-on-edges", "fp4: a cut is taken to begin where a group does", "weight values",
          "fp4", Fp4Stored, "cut", _cuts_begin_groups),
    Fault("fp4-scales-of-another", "fp4: an expert has the scales of another one", "ledger", "fp4",
          fp4.Fp4, "open", _scales_of_the_last),
    Fault("fp4-gate-up-swapped", "up before gate, in fp4 experts only", "ledger", "fp4",
          load, "opened", _swapped_in("fp4")),
    Fault("fp4-experts-as-fp8", "routed experts taken for block fp8", "ledger", "fp4",
          fp4.Fp4Experts, "format_of", lambda _: lambda storage, weight: storage.others),
    Fault("reference-int4-nibbles", "the reference's own nibbles in another order", "ledger",
          "int4", reference_quantised, "halves", lambda _: _high_first),
    Fault("reference-fp4-scale", "the reference's own fp4 scales upside down", "ledger", "fp4",
          reference_weights, "fp4", lambda original: lambda w, s: original(w, s.flip(0))),
]  # fmt: skip
