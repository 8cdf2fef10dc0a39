"""The latent of each token and its rotated key: what latent attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from trueline.cache.kinds import KindContext, PagedKind
from trueline.cache.kinds.inputs import FixedRows, InputContext, KindInputs, blocks_of, places
from trueline.cache.layout import LATENT_GROUP, LatentFp8, LatentLayout
from trueline.cache.rows import BatchRow
from trueline.cache.store import LatentStore, LatentView
from trueline.config import EngineConfig
from trueline.errors import UsageError
from trueline.ops.capabilities import Context, HeadDims, Opaque
from trueline.ops.mla_decode import DecodeRows, DecodeTable
from trueline.ops.mla_prefill import FEW, MaskedPrefill, PrefillRow, masked_context
from trueline.ops.registry import implementation
from trueline.ops.sparse_rows import Run, SparseRows, Table
from trueline.spec.mixer import MLASpec
from trueline.spec.model import ModelSpec

NO_ROWS = SparseRows(())
VLLM_NAMES = {"fp8": "e4m3fn", "fp8_e4m3": "e4m3fn"}
"""Of kv_cache_dtype."""


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """Where a prefill row's tokens stand among the step's tokens."""

    tokens: slice
    row: PrefillRow
    chosen: int = 0
    """The first one's row among those that choose what they see, if they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRows:
    """A step's tokens by how they attend."""

    decode: DecodeRows | DecodeTable
    """Tokens that attend to all before them, one row of the op each."""
    decode_at: Sequence[int] | slice
    """Where they stand among the step's tokens."""
    prefill: Sequence[PrefillSlice] = ()
    """Consecutive tokens that attend to all before them."""
    selected: SparseRows | Table = NO_ROWS
    """Tokens that attend to the positions they chose, one row of the op each."""
    selected_at: Sequence[int] | slice = ()
    selected_rows: Sequence[int] | slice = ()
    """Where they stand among the tokens that choose."""
    masked: Sequence[PrefillSlice] = ()
    """Consecutive tokens that attend to all before them, with a mask over what they did not choose.
    """


@dataclass(frozen=True, slots=True)
class DecodeInput:
    at: slice | Tensor  # where the rows stand among the step's tokens
    count: int
    prepared: Opaque  # what mla_decode made of them


@dataclass(frozen=True, slots=True)
class SelectedInput:
    at: slice | Tensor  # where the rows stand among the step's tokens
    rows: slice | Tensor  # and among the tokens that choose
    count: int
    prepared: Opaque  # what sparse_mla made of them


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentInput:
    cells: Tensor  # [tokens] where each token's row goes
    decode: DecodeInput | None
    selected: SelectedInput | None
    prefill: Opaque | None  # what mla_prefill made of the runs
    masked: Opaque | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent(PagedKind[LatentView, LatentInput]):
    name: ClassVar[str] = "latent"
    label: ClassVar[str | None] = "latent"
    ops: ClassVar[tuple[str, ...]] = ("latent_write", "mla_decode", "mla_prefill")
    writers: ClassVar[tuple[str, ...]] = ("latent_write",)
    layers: tuple[int, ...]
    mixer: MLASpec
    """Of one of the layers: all have the same heads and widths."""
    layout: LatentLayout
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> Latent | None:
        """Rows of one layout, so that one block table serves them all. A layer that differs must
        not get the rows of the first silently."""
        mixers = enumerate(layer.mixer for layer in spec.layers)
        layers = {i: mixer for i, mixer in mixers if isinstance(mixer, MLASpec)}
        if not layers:
            return None
        widths = {
            (m.kv_lora_rank, m.qk_rope_head_dim, m.heads, m.qk_nope_head_dim, m.v_head_dim)
            for m in layers.values()
        }
        if len(widths) != 1:
            raise UsageError(
                f"{spec.family}: accepted so far: models with as many heads and rows of the same "
                "widths in all layers with latent attention"
            )
        mixer = next(iter(layers.values()))
        layout = LatentLayout(
            mixer.kv_lora_rank,
            mixer.qk_rope_head_dim,
            context.block_size,
            storage(context.config, mixer.kv_lora_rank, context.compute),
        )
        return cls(layers=tuple(layers), mixer=mixer, layout=layout, dtype=context.compute)

    def __str__(self) -> str:
        layout, fp8 = self.layout, self.layout.fp8
        dtype = str(self.dtype).removeprefix("torch.")
        each = f"{layout.row_bytes(self.dtype.itemsize):,} bytes a token and layer"
        if fp8 is None:
            return f"{layout.latent} + {layout.rope} numbers in {dtype}, {each}"
        kind = "power-of-two" if fp8.power_of_two else "float32"
        channels = min(fp8.group, layout.latent)
        return (
            f"{layout.latent} numbers in {fp8.storage} with a {kind} scale per {channels} of them, "
            f"{layout.rope} in {dtype}, {each}"
        )

    @property
    def topk(self) -> int | None:
        """Positions that a token attends to; None: all before it."""
        return self.mixer.indexer.topk if self.mixer.indexer else None

    def num_read(self, context: int) -> float:
        return context if self.topk is None else min(context, self.topk)

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def block_bytes(self) -> int:
        return LatentStore.block_bytes(self.layout, len(self.layers), self.dtype)

    def allocate(self, num_blocks: int) -> LatentStore:
        return LatentStore(self.layout, len(self.layers), num_blocks, self.dtype)

    def inputs(self, context: InputContext[LatentView]) -> LatentInputs:
        return LatentInputs(self, context)

    def tell(self, context: Context) -> Context:
        return replace(context, heads=HeadDims.of(self.mixer), latent=self.layout)

    def costly_contexts(self, count: int) -> tuple[int, ...]:
        """With an indexer, prefill has another form of attention over contexts that are not so
        long."""
        return () if self.topk is None else (max(self.longest_masked(count) - count, 0),)

    def longest_masked(self, count: int) -> int:
        """The longest context over which `count` tokens attend to all and hide what they did not
        choose."""
        assert self.topk is not None
        nope, value = self.mixer.qk_nope_head_dim, self.mixer.v_head_dim
        return masked_context(self.layout, nope, value, self.topk, count)


def storage(config: EngineConfig, latent: int, compute: torch.dtype) -> LatentFp8 | None:
    """What the options ask for; None: as computed."""
    if config.kv_cache_dtype == "auto":
        return None
    if not latent:
        raise UsageError(
            f"kv_cache_dtype = {config.kv_cache_dtype!r}: every channel of this model's cache rows "
            "rotates, and those stay as computed; accepted: 'auto'"
        )
    group = config.kv_cache_group_size
    return LatentFp8(
        storage=VLLM_NAMES.get(config.kv_cache_dtype, config.kv_cache_dtype),
        rope=str(compute).removeprefix("torch."),
        group=LATENT_GROUP if group == "auto" else latent if group == "token" else group,
        power_of_two=config.kv_cache_scale_fmt == "ue8m0",
    )


class LatentInputs(KindInputs[LatentRows, LatentInput]):
    def __init__(self, kind: Latent, context: InputContext[LatentView]) -> None:
        self.kind, self.context, self.topk = kind, context, kind.topk
        self.heads = HeadDims.of(kind.mixer)
        names = context.implementations
        self.decode = implementation("mla_decode", names["mla_decode"])
        self.prefill = implementation("mla_prefill", names["mla_prefill"])
        self.selected = self.masked = None
        if self.topk is not None:
            self.limits = (self.topk,)
            self.selected = implementation("sparse_mla", names["sparse_mla"])
            if "run_chosen" in self.prefill.capabilities.optional and not context.batch_invariant:
                self.masked = cast("MaskedPrefill[Opaque]", self.prefill)

    def read(self, rows: Sequence[BatchRow]) -> LatentRows:
        """Tokens that see more than `topk` positions choose among them. In batch-invariant mode
        every token is a row of its own, attended in the same form however it was scheduled."""
        decode, decode_at = DecodeRows([], []), list[int]()
        prefill: list[PrefillSlice] = []
        runs: list[tuple[int, Run]] = []
        for row in rows:
            blocks, first = row.tables[self.context.group], row.tokens.start
            dense = row.num_seeing(self.topk)
            cut = first + dense
            if dense and (row.is_decode or self.context.batch_invariant):
                decode.lengths.extend(range(row.start + 1, row.start + dense + 1))
                decode.block_ids.extend([blocks] * dense)
                decode_at += range(first, cut)
            elif dense:
                part = PrefillRow(row.start, dense, blocks)
                prefill.append(PrefillSlice(slice(first, cut), part))
            if dense < row.count:
                runs.append((cut, Run(blocks, row.start + dense + 1, row.count - dense)))
        attending = LatentRows(decode=decode, decode_at=decode_at, prefill=prefill)
        return self.split(attending, runs) if runs else attending

    def split(self, rows: LatentRows, runs: Sequence[tuple[int, Run]]) -> LatentRows:
        """With tokens that choose, as (the first one's place among the step's tokens, run). Runs of
        many tokens whose context is not much longer than what they choose attend over all of it, if
        there is an op for it; the others over lists."""
        masked: list[PrefillSlice] = []
        listed: list[Run] = []
        at: list[int] = []
        chosen: list[int] = []
        row = 0
        for token, run in runs:
            if self._attends_masked(run):
                part = PrefillRow(run.first - 1, run.count, run.block_ids)
                masked.append(PrefillSlice(slice(token, token + run.count), part, row))
            else:
                listed.append(run)
                at += range(token, token + run.count)
                chosen += range(row, row + run.count)
            row += run.count
        return replace(
            rows,
            selected=SparseRows(tuple(listed)),
            selected_at=at,
            selected_rows=chosen,
            masked=masked,
        )

    def _attends_masked(self, run: Run) -> bool:
        if run.count <= FEW or self.masked is None:
            return False
        return run.first + run.count - 1 <= self.kind.longest_masked(run.count)

    def read_fixed(self, fixed: FixedRows) -> LatentRows:
        """Where some token may see more than `topk` positions all choose: those that see less take
        all of it."""
        lengths, each = fixed.lengths, fixed.tokens_per_row
        blocks = blocks_of(fixed, self.context.group, self.kind.block_size)
        everything = slice(0, len(lengths))
        if self.topk is not None and fixed.longest > self.topk:
            return LatentRows(
                decode=DecodeRows([], []),
                decode_at=(),
                selected=row_table(blocks, lengths, each),
                selected_at=everything,
                selected_rows=everything,
            )
        table = DecodeTable(lengths, by_token(blocks, each))
        return LatentRows(decode=table, decode_at=everything)

    def build(self, rows: LatentRows, cells: Sequence[Tensor]) -> LatentInput:
        return LatentInput(
            cells=cells[self.context.group],
            decode=self._decode(rows),
            selected=self._selected(rows),
            prefill=self._prefill(rows.prefill),
            masked=self._masked(rows.masked),
        )

    def _decode(self, rows: LatentRows) -> DecodeInput | None:
        count = len(rows.decode.lengths)
        if not count:
            return None
        view, tiling = self.context.view, self.context.tiling
        prepared = self.decode.prepare(rows.decode, view, tiling, self.heads.count)
        return DecodeInput(self._at(rows.decode_at), count, prepared)

    def _selected(self, rows: LatentRows) -> SelectedInput | None:
        count = len(rows.selected.lengths)
        if not count:
            return None
        assert self.selected is not None
        prepared = self.selected.prepare(rows.selected, self.context.view, self.context.tiling)
        return SelectedInput(
            self._at(rows.selected_at), self._at(rows.selected_rows), count, prepared
        )

    def _prefill(self, parts: Sequence[PrefillSlice]) -> Opaque | None:
        if not parts:
            return None
        return self.prefill.prepare(parts, self.context.view, self.heads, self.decode)

    def _masked(self, parts: Sequence[PrefillSlice]) -> Opaque | None:
        if not parts:
            return None
        assert self.masked is not None
        return self.masked.prepare_chosen(parts, self.context.view, self.heads)

    def _at(self, tokens: Sequence[int] | slice) -> slice | Tensor:
        return tokens if isinstance(tokens, slice) else places(tokens, self.context.device)


def row_table(blocks: Tensor, lengths: Tensor, tokens_per_row: int) -> Table:
    """Of rows that have `tokens_per_row` tokens each."""
    rows = torch.arange(len(blocks), device=blocks.device)
    return Table(blocks, by_token(rows, tokens_per_row), lengths)


def by_token(rows: Tensor, tokens_per_row: int) -> Tensor:
    """What belongs to a row, for each of its tokens."""
    return rows if tokens_per_row == 1 else rows.repeat_interleave(tokens_per_row, 0)
