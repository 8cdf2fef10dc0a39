"""`trueline.verify` for programs: a run, the mismatch of logprobs against closed forms, and choices
that are recorded and taken again."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import trueline.verify
from trueline.errors import UsageError
from trueline.verify import logprob_mismatch, recorded_choices, replayed_logprobs, verify
from trueline.verify.cases import make_subject

Tiny = Callable[..., Path]


# -- the mismatch ----------------------------------------------------------------------


def test_closed_forms() -> None:
    trainer, rollout = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5]
    d = [0.5, -1.0, 0.0]
    found = logprob_mismatch(trainer, rollout)
    assert (found.sequences, found.tokens) == (1, 3)
    assert found.kl_k1 == pytest.approx(0.5 / 3, rel=1e-12)
    assert found.kl_k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 3, rel=1e-12)
    assert found.token_mult_prob_error == pytest.approx(
        sum(math.exp(abs(x)) for x in d) / 3, rel=1e-12
    )
    assert found.mean_abs == pytest.approx(0.5, rel=1e-12)
    assert found.max_abs == 1.0
    assert found.outliers == pytest.approx(1 / 3), "half a nat is no factor of two"
    assert [(row.position, row.difference) for row in found.worst] == [(1, -1.0), (0, 0.5), (2, 0)]
    assert found.drift is None, "too few tokens"


def test_both_estimates_are_the_divergence() -> None:
    """Over tokens in exactly their shares: E[k1] = E[k3] = KL(rollout ‖ trainer)."""
    # sums of float32's 0.2 and 0.3 are not 1, which k3 would see
    q, p = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.5, 0.3]], dtype=torch.float64)
    drawn = torch.tensor([0, 0, 1, 2])
    found = logprob_mismatch(p.log()[drawn], q.log()[drawn])
    exact = float((q * (q / p).log()).sum())
    assert found.kl_k1 == pytest.approx(exact, rel=1e-12)
    assert found.kl_k3 == pytest.approx(exact, rel=1e-12)
    assert logprob_mismatch(q.log()[drawn], q.log()[drawn]).kl_k3 == 0


def test_drift_is_a_line_by_least_squares() -> None:
    """Against the textbook's matrices."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(400).double()
    off = 0.01 + 6e-5 * positions + 0.002 * torch.rand(400, generator=generator).double()
    rollout = -2 * torch.ones(400).double()
    found = logprob_mismatch(rollout - off, rollout).drift
    assert found is not None
    x = torch.stack([torch.ones(400).double(), positions], dim=1)
    inverse = torch.linalg.inv(x.T @ x)
    line = inverse @ x.T @ off
    rest = off - x @ line
    variance = inverse @ (x.T * rest.square()) @ x @ inverse * 400 / 398
    assert found.slope == pytest.approx(1000 * float(line[1]), rel=1e-9)
    assert found.error == pytest.approx(1000 * float(variance[1, 1].sqrt()), rel=1e-9)
    assert found.p < 1e-12
    assert found.early == pytest.approx(float(off[:40].mean()), rel=1e-9)
    assert found.late == pytest.approx(float(off[-40:].mean()), rel=1e-9)
    flat = logprob_mismatch(rollout - off[torch.randperm(400, generator=generator)], rollout)
    assert flat.drift is not None
    assert flat.drift.p > 0.01


def test_alarms() -> None:
    rollout = torch.full((200,), -3.0).double()
    assert logprob_mismatch(rollout, rollout).alarms() == []
    assert logprob_mismatch(rollout + 0.01, rollout).alarms() == []
    far = logprob_mismatch(rollout + 0.3, rollout).alarms()
    assert [words.split(",")[0] for words in far] == [
        "KL (k3) 0.04986", "token_mult_prob_error 1.35"
    ]  # fmt: skip
    grows = logprob_mismatch(rollout + torch.linspace(0.001, 0.03, 200), rollout).alarms()
    assert len(grows) == 1
    assert grows[0].startswith("|difference| grows from 0.00")


def test_several_sequences_and_masks() -> None:
    rows = [[-1.0, -2.0, -3.0], [-1.0, -9.0]]
    other = [[-1.0, -2.0, -3.5], [-1.25, -1.0]]
    found = logprob_mismatch(rows, other, mask=[[1, 1, 1], [1, 0]])
    assert (found.sequences, found.tokens, found.max_abs) == (2, 4, 0.5)
    assert [(row.sequence, row.position) for row in found.worst[:2]] == [(0, 2), (1, 0)]
    batch = logprob_mismatch(
        torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[-1.0, -2.0], [-3.0, -4.5]])
    )
    assert (batch.sequences, batch.tokens, batch.worst[0].sequence) == (2, 4, 1)


def test_differing_choices_are_told_apart() -> None:
    """Token 1 chose otherwise; token 2 chose alike, behind it."""
    trainer = torch.tensor([-1.0, -2.0, -1.0, -1.0])
    rollout = torch.tensor([-1.0, -1.0, -1.5, -1.0])
    ours = torch.tensor([[[3, 1]], [[2, 1]], [[0, 1]], [[0, 1]]])
    theirs = torch.tensor([[[1, 3]], [[4, 1]], [[1, 0]], [[0, 1]]])
    found = logprob_mismatch(trainer, rollout, experts=(ours[None], theirs[None])).experts
    assert found is not None
    k3 = [0.0, math.exp(-1), math.exp(0.5) - 1.5, 0.0]
    assert found.differing == 0.25
    assert found.by_layer == [0.25]
    assert found.kl_differing == pytest.approx(k3[1])
    assert found.kl_same == pytest.approx(k3[2] / 3)
    assert found.untouched == 0.25
    assert found.kl_untouched == 0
    assert found.explained == pytest.approx(k3[1] / sum(k3))
    padded = torch.nn.functional.pad(theirs, (0, 2), value=-1)
    assert logprob_mismatch(trainer, rollout, selected=([ours], [padded])).selected == found


@pytest.mark.parametrize(
    ("trainer", "rollout", "more", "words"),
    [
        ([-1.0, -2.0], [-1.0], {}, r"trainer has sequences of \[2\] tokens, rollout of \[1\]"),
        ([-1.0, 0.5], [-1.0, -1.0], {}, "trainer: sequence 0, position 1: 0.5; accepted: logprobs"),
        ([-1.0], [-math.inf], {}, "rollout: sequence 0, position 0: -inf"),
        ([-1.0], [math.nan], {}, "rollout: sequence 0, position 0: nan"),
        ([], [], {}, "no token counts"),
        ([-1.0], [-1.0], {"mask": [0]}, "no token counts"),
        (["a"], [-1.0], {}, "trainer: accepted: numbers"),
        ([-1.0], [-1.0], {"experts": ([[[1]]], [[[1]]])}, "experts of trainer: .*accepted: 3 dims"),
    ],
)
def test_what_is_no_logprob_is_refused(
    trainer: list[float], rollout: list[float], more: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        logprob_mismatch(trainer, rollout, **more)  # type: ignore[arg-type]


# -- choices ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["glm5", *(pytest.param(each, marks=pytest.mark.slow)
                       for each in ("v3-near", "ling", "v32-near", "v4-small"))]
)  # fmt: skip
def test_choices_are_recorded_and_taken_again(case: str, tmp_path: Path) -> None:
    """By the engine in any chunks, and by the definition; other choices give other logprobs, the
    same in both."""
    model = make_subject(case, tmp_path / case).model
    tokens = _tokens(80)
    made = recorded_choices(model, tokens)
    given = {"experts": made.experts, "selected": made.selected}
    assert torch.equal(replayed_logprobs(model, tokens, **given), made.logprobs)
    exact = replayed_logprobs(model, tokens, **given, definition=True)
    assert (exact - made.logprobs).abs().max() < 2e-5
    chunked = recorded_choices(model, tokens, max_num_batched_tokens=13)
    for what in ("experts", "selected"):
        ours, theirs = getattr(made, what), getattr(chunked, what)
        assert ours.keys() == theirs.keys()
        for layer in ours:
            assert torch.equal(ours[layer].sort(-1).values, theirs[layer].sort(-1).values)
    other = {layer: (ids + 1) % (int(ids.max()) + 1) for layer, ids in made.experts.items()}
    ours = replayed_logprobs(
        model, tokens, experts=other, selected=made.selected, max_num_batched_tokens=13
    )
    theirs = replayed_logprobs(
        model, tokens, experts=other, selected=made.selected, definition=True
    )
    assert (ours - made.logprobs).abs().max() > 0.1
    assert (ours - theirs).abs().max() < 2e-5


def test_other_keys_are_taken(tmp_path: Path) -> None:
    """Of the positions that choose; by the layers that share the choice too."""
    model = make_subject("glm5", tmp_path / "glm5").model
    tokens = _tokens(60)
    made = recorded_choices(model, tokens)
    other = {layer: _first_keys(rows) for layer, rows in made.selected.items()}
    ours = replayed_logprobs(model, tokens, selected=other, max_num_batched_tokens=17)
    theirs = replayed_logprobs(model, tokens, selected=other, definition=True)
    assert (ours - made.logprobs).abs().max() > 1e-2
    assert (ours - theirs).abs().max() < 2e-5


def test_a_rollouts_own_record(tiny: Tiny) -> None:
    """[tokens, layers, chosen], without a row for the last token; the mismatch with it is that of
    the numbers alone."""
    model, tokens = tiny("deepseek_v3"), _tokens(40)
    made = recorded_choices(model, tokens)
    routed = made.stacked()[:-1].int()
    assert torch.equal(replayed_logprobs(model, tokens, experts=routed), made.logprobs)
    trainer = replayed_logprobs(model, tokens, experts=routed, definition=True)
    found = logprob_mismatch(trainer, made.logprobs, experts=(routed[None], routed[None]))
    assert found.tokens == 39
    assert found.max_abs < 2e-5
    assert found.alarms() == []
    assert found.experts is not None
    assert found.experts.differing == 0


def test_wrong_records_are_refused(tiny: Tiny) -> None:
    model, tokens = tiny("deepseek_v3"), _tokens(20)
    made = recorded_choices(model, tokens)
    stacked = made.stacked()
    for given, words in (
        ({"experts": stacked[:, :1]}, r"experts: .*; accepted: \[tokens, \d layers, chosen\]"),
        ({"experts": stacked[:5]}, "accepted: .20 or 19 tokens, chosen"),
        ({"experts": stacked + 1000}, "ids from 0 to"),
        ({"experts": stacked[..., :1]}, "ids from 0 to"),
        ({"experts": {0: stacked[:, 0]}}, "layer 0 chooses nothing"),
        ({"selected": {1: stacked[:, 0]}}, "layer 1 chooses nothing"),
        ({"tensor_parallel_size": 2}, "on one rank"),
        ({"max_num_seq": 2}, "unknown argument 'max_num_seq'"),
    ):
        with pytest.raises(UsageError, match=words):
            replayed_logprobs(model, tokens, **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="2 or more"):
        recorded_choices(model, [3])
    with pytest.raises(UsageError, match="token 100000; accepted: 0 to"):
        recorded_choices(model, [3, 100_000])


def _tokens(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(200, (count,), generator=generator).tolist()


def _first_keys(rows: Tensor) -> Tensor:
    """As many keys as were chosen, the oldest ones."""
    places = torch.arange(rows.shape[1]).expand_as(rows)
    return places.where(rows.sort(-1, descending=True).values >= 0, -1)


# -- a run -----------------------------------------------------------------------------


def test_a_run(tiny: Tiny) -> None:
    seen: list[str] = []
    report = verify(
        tiny("deepseek_v3"), tier="smoke", only=("layers",), block_size=8,
        progress=lambda check, done, total: seen.append(check),
    )  # fmt: skip
    assert report.passed
    assert [check.id for check in report.checks] == ["layers/each half"]
    assert report.options["block_size"] == "8"
    assert seen[0] == "timing a layer"
    assert seen[1] == "layers/each half"
    assert "layers/each half: layer 2 of 4" in seen
    assert report.estimated is not None
    assert report.estimated > 0
    with pytest.raises(UsageError, match="unknown argument 'block_sise'"):
        verify(tiny("deepseek_v3"), block_sise=8)


def test_what_is_imported_is_there_and_late() -> None:
    for name in trueline.verify.__all__:
        assert getattr(trueline.verify, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trueline.verify.nothing  # type: ignore[attr-defined]
    code = "import sys, trueline.verify; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
