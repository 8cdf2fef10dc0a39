"""Mistakes with rows that carry drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from trueline.cache.kinds import latent, lightning
from trueline.cache.rows import BatchRow
from trueline.engine import results
from trueline.engine.states import States
from trueline.engine.step import Row
from trueline.ops.lightning import StateRow
from trueline.ops.sampling import SamplingState
from trueline.verify.faults import Fault, Make


def _never_rolled_back(settle: Make) -> Make:
    """The state after the last draft stays the request's, right or wrong."""

    def broken(self: States, row: Row, accepted: int) -> None:
        settle(self, row, row.num_drafts)

    return broken


def _same_noise(after: Make) -> Make:
    def broken(self: SamplingState, drafts: Sequence[int]) -> SamplingState:
        made: SamplingState = after(self, drafts)
        return replace(made, position=self.position)

    return broken


def _drafts_not_counted(after: Make) -> Make:
    def broken(self: SamplingState, drafts: Sequence[int]) -> SamplingState:
        made: SamplingState = after(self, drafts)
        return replace(made, output_ids=list(self.output_ids))

    return broken


def _from_the_first(state_rows: Make) -> Make:
    """Every token of a row starts from the state before the row."""

    def broken(row: BatchRow) -> Iterator[StateRow]:
        assert row.state is not None
        return (replace(each, source=row.state.source) for each in state_rows(row))

    return broken


def _tables_in_turn(_: Make) -> Make:
    """The tokens of a row get the tables of different rows."""

    def broken(rows: Tensor, tokens_per_row: int) -> Tensor:
        return rows.repeat(tokens_per_row, *[1] * (rows.ndim - 1))

    return broken


_P, _C = "drafts = plain", "drafts = plain, captured"

DRAFT_FAULTS = [
    Fault("draft-not-compared", "drafts are taken for right without a look", _P, "v3-near",
          results, "accepts", lambda _: lambda token, point: point.draft is not None),
    Fault("draft-state-kept", "a state after wrong drafts is gone on from", _P, "ling",
          States, "settle", _never_rolled_back),
    Fault("draft-state-source", "each token starts from the state before the row", _P, "ling",
          lightning, "state_rows", _from_the_first),
    Fault("draft-same-noise", "all tokens of a row are drawn with the same noise", _P, "v3-near",
          SamplingState, "after", _same_noise),
    Fault("draft-not-penalised", "penalties do not see the drafts before a token", _P, "v3-near",
          SamplingState, "after", _drafts_not_counted),
    Fault("draft-tables", "captured rows have each other's block tables", _C, "v3-shallow",
          latent, "by_token", _tables_in_turn),
    Fault("draft-tables-sparse", "the same where rows choose", _C, "v32-shallow",
          latent, "by_token", _tables_in_turn),
    Fault("draft-state-captured", "captured tokens start from the state before the row", _C,
          "ling-shallow", lightning, "state_rows", _from_the_first),
]  # fmt: skip
