"""The queries of a step, for the ops of sparse attention: which sequence each belongs to, and how
much of it it sees. Decode rows and every token of a prefill row are rows of the same kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.device import send
from trueline.ops.block_tables import padded


@dataclass(frozen=True, slots=True)
class Run:
    """`count` rows of one sequence that follow each other: the first sees the sequence's first
    `first` positions, each further row one more. A decode row is a run of one. Where an entry
    stands for every `ratio` positions, a row sees the entries that are complete: `length` of them,
    in blocks of entries."""

    block_ids: list[int]
    first: int
    count: int = 1
    ratio: int = 1

    def length(self, row: int) -> int:
        """What a row of the run sees, in positions or entries."""
        return (self.first + row) // self.ratio

    @property
    def longest(self) -> int:
        return self.length(self.count - 1)

    def num_seeing(self, most: int) -> int:
        """Of its rows, the leading ones that see at most so much."""
        return min(max((most + 1) * self.ratio - self.first, 0), self.count)

    def between(self, start: int, stop: int) -> Run:
        return replace(self, first=self.first + start, count=stop - start)


@dataclass(frozen=True, slots=True)
class SparseRows:
    runs: tuple[Run, ...]

    @property
    def lengths(self) -> list[int]:
        """How much each row sees, in positions or entries."""
        return [run.length(i) for run in self.runs for i in range(run.count)]

    def parts(self, limit: int) -> list[tuple[slice, SparseRows]]:
        """Cut so that no part has more than one row and more than `limit` numbers, were all its
        rows as wide as its longest; with where each part's rows stand among all."""
        cuts, longest = [0], 0
        for row, length in enumerate(self.lengths):
            longest = max(longest, length)
            if row > cuts[-1] and (row + 1 - cuts[-1]) * longest > limit:
                cuts.append(row)
                longest = length
        ends = pairwise([*cuts, len(self.lengths)])
        return [(slice(start, stop), self._between(start, stop)) for start, stop in ends]

    def _between(self, start: int, stop: int) -> SparseRows:
        runs: list[Run] = []
        row = 0
        for run in self.runs:
            first, last = max(start - row, 0), min(stop - row, run.count)
            if first < last:
                runs.append(run.between(first, last))
            row += run.count
        return SparseRows(tuple(runs))


@dataclass(frozen=True, slots=True)
class Table:
    """The same as tensors; `of` makes them on the host."""

    blocks: Tensor  # [runs, most]; the null block after a sequence's last
    run: Tensor  # [n] which run a row is of: rows and runs are counted apart
    lengths: Tensor  # [n]

    @staticmethod
    def of(rows: SparseRows) -> Table:
        owner = [i for i, run in enumerate(rows.runs) for _ in range(run.count)]
        run, lengths = (
            torch.tensor(numbers, dtype=torch.long, device="cpu")
            for numbers in (owner, rows.lengths)
        )
        return Table(padded([run.block_ids for run in rows.runs], least=1), run, lengths)

    def to(self, device: torch.device) -> Table:
        return Table(*(send(part, device) for part in (self.blocks, self.run, self.lengths)))

    def cells(self, positions: Tensor, layout: LatentLayout) -> tuple[Tensor, Tensor]:
        """Where the chosen positions [n, k] of each row lie, and how many there are: a row's list
        ends at its first -1. Cells after the end are 0."""
        chosen = (positions >= 0).cumprod(1)
        if bool((chosen * (positions >= self.lengths[:, None])).any()):
            raise ValueError("a row's selection names a position that the row does not see")
        at = positions.masked_fill(chosen == 0, 0)
        blocks = self.blocks[self.run[:, None], at // layout.block_size]
        return layout.cell(blocks, at) * chosen, chosen.sum(1)
