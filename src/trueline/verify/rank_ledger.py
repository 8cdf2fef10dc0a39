"""What the ranks hold between them: every number of a checkpoint as often as its placement says,
with the scales that belong to it, and as the loader reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from trueline.models import read_model
from trueline.spec.mixer import CompressedSpec, LightningSpec, MLASpec
from trueline.spec.model import ModelSpec
from trueline.spec.shard import local_spec
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed
from trueline.weights.checkpoint import StoredTensor, open_checkpoint
from trueline.weights.formats import Format
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.formats.fp4 import GROUP, Fp4
from trueline.weights.formats.pack_int4 import WORD, PackInt4
from trueline.weights.load import Files, opened
from trueline.weights.rank_ledger import Held, HeldTensor, Wanted, slices_of, wanted_pieces

BY_HEAD = re.compile(
    r"self_attn\.((q_proj|q_b_proj|kv_b_proj|o_proj|query_key_value|g_proj|g_norm|o_a_proj|o_b_proj)"
    r"\.weight|sinks)$"
)
BY_WIDTH = re.compile(r"mlp\.(.*experts\.)?(gate_proj|up_proj|down_proj|gate_up_proj)(\.weight)?$")
BY_WORD = ("model.embed_tokens.weight", "lm_head.weight")
LAYER = re.compile(r"layers\.(\d+)\.")
RANKS = 2


@dataclass(frozen=True, slots=True)
class Cells:
    """How many rows and columns of a weight share one element of a stored tensor; and how many of
    them a rank may hold together, since they have one scale."""

    shared: tuple[int, int]
    kept: tuple[int, int]


def rank_ledger(subject: Subject, size: int = RANKS) -> None:
    """Divided in every way."""
    for invariant_sums, expert_parallel in product((False, True), repeat=2):
        ranks_hold_every_byte(subject.model, size, invariant_sums, expert_parallel)


def ranks_hold_every_byte(
    model: Path, size: int, invariant_sums: bool, expert_parallel: bool
) -> None:
    spec, checkpoint = read_model(model), open_checkpoint(model)
    assert checkpoint is not None
    how = {"invariant_sums": invariant_sums, "expert_parallel": expert_parallel}
    held: dict[str, list[Held]] = {}
    for rank in range(size):
        files = Files()
        for wanted in wanted_pieces(checkpoint, local_spec(spec, rank, size, **how)):
            told = list(slices_of(wanted))
            _loaded_as_told(files, wanted, told)
            held.setdefault(wanted.piece.source, []).extend(told)
    for wanted in wanted_pieces(checkpoint, spec):
        ours = held.get(wanted.piece.source, [])
        _held_as_placed(spec, wanted, ours, size)
        for each in ours:
            _scales_belong(each, wanted.use.format)
        for tensor in wanted.use.tensors:
            _every_byte_is_held(tensor, ours)


def times_held(spec: ModelSpec, name: str, size: int) -> int:
    """How many ranks hold each number of a parameter: one where it is divided, all where it is
    replicated."""
    if name in BY_WORD:
        return size if spec.vocab.total % size else 1
    if BY_HEAD.search(name):
        layer = LAYER.search(name)
        assert layer is not None
        mixer = spec.layers[int(layer[1])].mixer
        assert isinstance(mixer, MLASpec | LightningSpec | CompressedSpec)
        return size if mixer.heads.total < size else 1
    return 1 if BY_WIDTH.search(name) else size


def _held_as_placed(spec: ModelSpec, wanted: Wanted, held: Sequence[Held], size: int) -> None:
    counts = torch.zeros(wanted.piece.shape, dtype=torch.int16)
    for each in held:
        counts[each.cut] += 1
    times = times_held(spec, wanted.parameter.name, size)
    wrong = (counts != times).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        raise CheckFailed(
            f"rank ledger: {wanted.piece.source} {at}: held by {int(counts[tuple(at)])} of {size} "
            f"ranks, its placement says {times}"
        )


def _cells(fmt: Format) -> list[Cells]:
    """Of each of a format's tensors that has rows and columns."""
    one = Cells((1, 1), (1, 1))
    if isinstance(fmt, BlockFp8):
        return [one, Cells(fmt.block, fmt.block)]
    if isinstance(fmt, PackInt4):
        group = (1, fmt.group)
        return [Cells((1, WORD), group), Cells(group, group)]
    if isinstance(fmt, Fp4):
        group = (1, GROUP)
        return [Cells((1, 2), group), Cells(group, group)]
    return []


def _scales_belong(held: Held, fmt: Format) -> None:
    """Each stored tensor is held for these numbers: all that they need, and nothing of blocks or
    groups that they do not touch."""
    for part, cells in zip(held.tensors, _cells(fmt), strict=False):
        for axis, taken in enumerate(held.cut):
            mine, shared, kept = part.slices[axis], cells.shared[axis], cells.kept[axis]
            needed = taken.start // shared, -(-taken.stop // shared)
            low, high = taken.start // kept * kept // shared, -(-taken.stop // kept) * kept
            allowed = low, min(-(-high // shared), part.tensor.shape[axis])
            if not (allowed[0] <= mine.start <= needed[0] and needed[1] <= mine.stop <= allowed[1]):
                raise CheckFailed(
                    f"rank ledger: {part.tensor}: {mine.start}:{mine.stop} along axis {axis} for "
                    f"numbers {taken.start}:{taken.stop}, which need {needed[0]}:{needed[1]}"
                )


def _every_byte_is_held(tensor: StoredTensor, held: Sequence[Held]) -> None:
    covered = torch.zeros(tensor.shape, dtype=torch.bool)
    for part in (part for each in held for part in each.tensors if part.tensor is tensor):
        covered[part.slices] = True
    if not bool(covered.all()):
        raise CheckFailed(f"rank ledger: {tensor}: bytes that no rank holds")


def _loaded_as_told(files: Files, wanted: Wanted, told: Sequence[Held]) -> None:
    """The tensors that the loader keeps are the slices that the account names."""
    for (stored, _), held in zip(opened(files, wanted), told, strict=True):
        kept = [getattr(stored, item.name) for item in fields(stored)]  # type: ignore[arg-type]
        tensors = [each for each in kept if isinstance(each, Tensor)]
        for ours, part in zip(tensors, held.tensors, strict=False):
            _require_same(ours, files.view(part.tensor), part)


def _require_same(ours: Tensor, whole: Tensor, part: HeldTensor) -> None:
    theirs = whole[part.slices]
    if ours.element_size() == theirs.element_size() == 1:
        ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
    elif ours.dtype != theirs.dtype:
        theirs = theirs.to(ours.dtype)
    if not torch.equal(ours, theirs):
        raise CheckFailed(f"rank ledger: {part.tensor}: not loaded as the account says")
