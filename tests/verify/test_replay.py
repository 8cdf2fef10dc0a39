"""What a failing check records runs again by itself: still wrong with the fault, right without it;
its op is named by putting others in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from trueline.config import EngineConfig
from trueline.errors import UsageError
from trueline.layers.decoder import Decoder
from trueline.layers.residual import SeveralStreams, SingleStream
from trueline.verify.cases import CASES, make_subject
from trueline.verify.faults import Fault
from trueline.verify.faults.table import FAULTS
from trueline.verify.replay import file, record, rerun
from trueline.verify.replay.alone import AS_SCHEDULED, DECODE, ONE_PREFILL, WAYS, PartAlone
from trueline.verify.replay.file import Recorded
from trueline.verify.replay.rerun import NOT_RUN, RIGHT, WRONG, Replayed, replay_file
from trueline.verify.report import Check, Place, Status
from trueline.verify.suite import compositions
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.judgement import MEDIAN_FACTOR
from trueline.verify.suite.numbers import Numbers
from trueline.verify.suite.run import Selection, verify
from trueline.verify.suite.sequences import PART_OF
from trueline.verify.suite.session import Session

Run = Callable[..., tuple[int, str, str]]
FIRST, MIXED = "layers/each half", "modes/mixed step"
BY_ID = {fault.id: fault for fault in FAULTS}


def louder(original: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*given: Any, **more: Any) -> Any:
        return original(*given, **more) * 1.03

    return broken


def louder_sums(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Where the output of the half before is added."""

    def broken(self: SingleStream, entry: object) -> torch.Tensor:
        return read(self, entry) * (1.0 if self.y is None else 1.03)

    return broken


ENTRY = Fault("entry", "", "", "v3-near", SingleStream, "read", louder_sums)
ENTRY_OF_STREAMS = Fault("entry-of-streams", "", "", "v4-small", SeveralStreams, "read", louder)
HEAD = Fault("head", "", "", "v3-near", Decoder, "logits", louder)


class Made:
    """Models and failing checks, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checks: dict[tuple[str, str], Check] = {}

    def __call__(self, case: str) -> tuple[Path, EngineConfig]:
        model = self.root / case
        if not model.exists():
            make_subject(case, model)
        return model, EngineConfig(facts=CASES[case].facts, **CASES[case].options)

    def failing(self, fault: Fault, check: str) -> Check:
        if (fault.id, check) not in self.checks:
            model, config = self(fault.case)
            chosen = Selection(tier="smoke", only=(FIRST, check))
            if check.startswith("ops/"):
                chosen = Selection(only=(check,))
            directory = self.root / f"replays of {fault.id}, {check.replace('/', ' ')}"
            with fault.seeded():
                report = verify(model, config, chosen, replay_dir=directory)
            found = next(each for each in report.checks if each.id == check)
            self.checks[fault.id, check] = found
        return self.checks[fault.id, check]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("models"))


def both(fault: Fault, check: Check, model: Path | None = None) -> tuple[Replayed, Replayed]:
    """With the fault, and without it."""
    assert check.replay is not None, check.evidence
    with fault.seeded():
        wrong = replay_file(check.replay, model)
    return wrong, replay_file(check.replay, model)


def codes(fault: Fault, check: Check, model: Path | None = None) -> tuple[int, int]:
    wrong, right = both(fault, check, model)
    return wrong.code, right.code


# -- faults ----------------------------------------------------------------------------

OF_PARTS = [
    (BY_ID["causal-off-by-one"], FIRST, "mixer"),
    (BY_ID["expert-weights-order"], FIRST, "feed forward"),
    (ENTRY, FIRST, "entry"),
    (HEAD, FIRST, "head"),
]
OF_SCHEDULES = [
    (BY_ID["decode-rows-shifted"], MIXED, "mixer"),
    (BY_ID["state-rows-shifted"], MIXED, "mixer"),
]
SELDOM = [
    (BY_ID["engine-selection-ignored"], FIRST, "selection"),
    (BY_ID["engine-shared-forgets"], FIRST, "mixer"),
    (BY_ID["state-slots-prefill-first"], MIXED, "mixer"),
    (BY_ID["window-one-long"], FIRST, "mixer"),
    (ENTRY_OF_STREAMS, FIRST, "entry"),
]
EACH = [
    *(pytest.param(*each, id=each[0].id) for each in (*OF_PARTS, *OF_SCHEDULES)),
    *(pytest.param(*each, id=each[0].id, marks=pytest.mark.slow) for each in SELDOM),
]


@pytest.mark.parametrize(("fault", "check", "part"), EACH)
def test_faults_are_replayed(fault: Fault, check: str, part: str, made: Made) -> None:
    """Without the checkpoint, and with it. What is wrong in mixed steps only is in the schedule."""
    found = made.failing(fault, check)
    assert found.status == Status.FAILED
    assert found.place is not None
    assert found.place.part == part
    wrong, right = both(fault, found)
    assert (wrong.code, right.code) == (WRONG, RIGHT)
    assert right.record is not None
    assert right.record.wrong, "the record does not change"
    assert [verdict.way for verdict in right.runs] == list(WAYS)
    if check == MIXED:
        ways = {verdict.way: verdict.wrong for verdict in wrong.runs}
        assert ways == {AS_SCHEDULED: True, ONE_PREFILL: False, DECODE: False}
    assert codes(fault, found, made(fault.case)[0]) == (WRONG, RIGHT)


def test_a_fault_outside_of_the_part_needs_the_checkpoint(made: Made) -> None:
    """The rope that the model gives every layer: alone, the layer is right."""
    fault = BY_ID["decode-rope-ahead"]
    found = made.failing(fault, FIRST)
    assert found.evidence.endswith("right when it runs alone on the same inputs")
    assert codes(fault, found) == (NOT_RUN, NOT_RUN)
    assert codes(fault, found, made(fault.case)[0]) == (WRONG, RIGHT)


def test_an_op_is_replayed(made: Made) -> None:
    fault = BY_ID["lse-base-2"]
    found = made.failing(fault, "ops/mla_decode=cpu, numbers")
    assert codes(fault, found) == (WRONG, RIGHT)
    assert found.replay is not None
    with fault.seeded():
        assert replay_file(found.replay, ops={"mla_decode": "reference"}).code == RIGHT


def test_what_has_no_part_runs_with_the_checkpoint(made: Made) -> None:
    fault = BY_ID["causal-off-by-one"]
    found = made.failing(fault, "logits/distribution")
    assert codes(fault, found) == (NOT_RUN, NOT_RUN)
    assert codes(fault, found, made(fault.case)[0]) == (WRONG, RIGHT)


# -- places ----------------------------------------------------------------------------


def test_the_op_is_named_by_swapping(made: Made) -> None:
    found = made.failing(BY_ID["causal-off-by-one"], FIRST)
    assert found.evidence.endswith("; right with mla_prefill=reference")
    assert found.place == Place(
        layer=0, part="mixer", op="mla_prefill", implementation="cpu", composition="whole prompt",
        request=0, position=0, path="prefill", block=1,
    )  # fmt: skip


def test_ops_that_were_asked_for_are_swapped_too(made: Made) -> None:
    """As with --op."""
    fault = BY_ID["causal-off-by-one"]
    model, config = made(fault.case)
    with fault.seeded():
        report = verify(
            model, replace(config, ops={"mla_prefill": "cpu"}), Selection(only=("layers",))
        )
    assert report.checks[0].evidence.endswith("; right with mla_prefill=reference")


def test_what_no_op_makes_is_of_no_op(made: Made) -> None:
    found = made.failing(BY_ID["state-rows-shifted"], MIXED)
    assert "; no op of it: wrong with lightning=reference, " in found.evidence
    assert found.place is not None
    assert (found.place.op, found.place.implementation) == (None, None)
    assert found.place.slot is not None
    assert found.place.block is None, "its layer keeps a state"


def test_blocks_are_those_of_the_position(made: Made) -> None:
    """As the step's own block tables have them."""
    model, config = made("v3-near")
    session = Session("v3-near", model, replace(config, block_size=4))
    ran = compositions.run(session, next(iter(compositions.compositions(session))))
    (request,) = ran.requests.observed
    blocks = [request.blocks[p][0] for p in range(request.count)]
    assert len(set(blocks)) == -(-request.count // 4)
    assert all(len(set(blocks[p : p + 4])) == 1 for p in range(0, request.count, 4))


# -- the part alone --------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    ["v3-near", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ling", "glm5", "fp8",
                                                                         "v4-small"))],
)  # fmt: skip
def test_a_part_alone_computes_the_same_bits(case: str, made: Made) -> None:
    """As in the whole engine, in the steps that its requests share; so what is replayed is what
    ran. And by itself it computes every position."""
    model, config = made(case)
    session = Session(case, model, config)
    numbers = Numbers(session)
    every = {each.name: each for each in compositions.compositions(session)}
    numbers.run(every["whole prompt"])
    for name, request, layers in (("mixed step", 2, range(session.definition.num_layers)),
                                  ("n samples of a prompt", 3, (1,))):  # fmt: skip
        composition = every[name]
        numbers.run(composition)
        whole = numbers.ran[name].requests.observed[request]
        for layer, (key, part) in product(layers, PART_OF.items()):
            recorded = recorded_right(numbers, composition, Place(
                layer=layer, part=part, request=request, position=0
            ))  # fmt: skip
            there = PartAlone(recorded, model, session.definition, layer)
            observed, _ = there.observe(AS_SCHEDULED, recorded.header.engine_config())
            assert observed.count == whole.count
            for p in range(whole.count):
                ours, theirs = (each.outputs[layer, key][p] for each in (observed, whole))
                assert torch.equal(ours, theirs), f"{name}: {part} of layer {layer}, position {p}"
    for way in (ONE_PREFILL, DECODE):
        assert there.observe(way, recorded.header.engine_config())[0].count == whole.count


def recorded_right(numbers: Numbers, composition: Composition, place: Place) -> Recorded:
    """As if it had been wrong."""
    check = Check(id="x", invariant="x", what="x", status=Status.FAILED, place=place)
    return record.record(numbers, check, composition)


# -- the file --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(made: Made) -> Path:
    """Of a fault in prefill, in steps of several requests."""
    check = made.failing(BY_ID["causal-off-by-one"], MIXED)
    assert check.replay is not None
    return Path(check.replay)


def test_files_read_as_they_were_written(failed: Path, tmp_path: Path) -> None:
    first = file.read(failed)
    file.write(first, tmp_path / "again")
    second = file.read(tmp_path / "again")
    assert second.header == first.header
    assert second.tensors.keys() == first.tensors.keys()
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name])
    assert second.weights.keys() == first.weights.keys()
    assert all(".self_attn." in n or "input_layernorm" in n for n in first.weights)
    assert first.header.engine_config().block_size == 16, "as it was, whatever is chosen elsewhere"


def test_another_checkpoint_is_refused(failed: Path, made: Made) -> None:
    with pytest.raises(UsageError, match="another checkpoint than"):
        replay_file(failed, made("ling")[0])


def test_other_files_are_refused(failed: Path, made: Made, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        replay_file(tmp_path / "nothing")
    with pytest.raises(UsageError, match="no replay file; accepted"):
        replay_file(made("v3-near")[0] / "model.safetensors")
    damaged = tmp_path / "damaged"
    damaged.write_bytes(failed.read_bytes()[:-100])
    with pytest.raises(UsageError, match="damaged"):
        replay_file(damaged)
    for other in (1, 3):  # the first knew no noise of medians
        changed = file.read(failed)
        changed.header.format = other
        file.write(changed, tmp_path / "other")
        with pytest.raises(UsageError, match=f"replay format {other}; accepted: 2"):
            replay_file(tmp_path / "other")


def test_large_weights_stay_in_the_checkpoint(failed: Path, made: Made, tmp_path: Path) -> None:
    recorded, model = file.read(failed), made("v3-near")[0]
    recorded.weights = {}
    record.add_weights(recorded, model, Session("x", model, EngineConfig()).definition.config, 999)
    assert not recorded.weights
    file.write(recorded, tmp_path / "small")
    with BY_ID["causal-off-by-one"].seeded():
        without = replay_file(tmp_path / "small")
        assert without.code == NOT_RUN
        assert "MB of 0: replay it with --model" in without.not_run[0]
        there = replay_file(tmp_path / "small", model)
    assert there.code == WRONG
    assert [verdict.way for verdict in there.runs] == [*WAYS, "with the whole model"]


def test_rows_that_are_left_out(failed: Path, tmp_path: Path) -> None:
    """Then it runs by itself, not as it was scheduled."""
    recorded = file.read(failed)
    recorded.tensors.pop("3.input")
    file.write(recorded, tmp_path / "part")
    done = replay_file(tmp_path / "part")
    assert [verdict.way for verdict in done.runs] == [ONE_PREFILL, DECODE]
    assert f"{AS_SCHEDULED}: rows of request 3 are not in the file" in done.not_run


def test_the_record_is_judged_by_what_was_accepted(failed: Path, made: Made) -> None:
    """With right numbers in it, it is right; with an error a little above what is accepted, not."""
    recorded, (model, config) = file.read(failed), made("v3-near")
    definition = Session("x", model, config).definition
    half = recorded.header.half
    assert half is not None
    exact, size = recorded.tensors["0.exact"], torch.zeros(len(recorded.tensors["0.exact"]), 1)
    middle = next(
        value for of, value in recorded.header.bands if of.median and of.part == half.part
    )
    every = MEDIAN_FACTOR * middle / half.accepted
    for factor, rows, wrong in (
        (0.0, slice(None), False), (0.9, slice(7, 8), False), (1.5, slice(7, 8), True),
        (0.7 * every, slice(None), False), (1.5 * every, slice(None), True),
    ):  # fmt: skip
        size.zero_()[rows] = factor * half.accepted
        recorded.tensors["0.output"] = (exact * (1 + size)).float()
        part = PartAlone(recorded, model, definition, half.layer)
        assert part.judge_record().wrong == wrong, factor


def test_a_record_names_the_position_that_is_wrong_in_it(failed: Path, made: Made) -> None:
    """Whatever was wrong when it was written."""
    recorded, (model, config) = file.read(failed), made("v3-near")
    definition, half = Session("x", model, config).definition, recorded.header.half
    assert half is not None
    size = torch.zeros(len(recorded.tensors["0.exact"]), 1)
    size[7] = 1.5 * half.accepted
    recorded.tensors["0.output"] = (recorded.tensors["0.exact"] * (1 + size)).float()
    verdict = PartAlone(recorded, model, definition, half.layer).judge_record()
    assert verdict.what.startswith(f"{half.part} at position 7: off by ")


def test_noise_of_a_coarser_dtype_is_accepted(failed: Path) -> None:
    """Where the same checkpoint computes in 16 bits; but no more than these explain."""
    recorded = file.read(failed)
    done = replay_file(failed)
    assert done.code == RIGHT
    for bands in (recorded.header.bands, [(of, 0.0) for of, _ in recorded.header.bands]):
        recorded.header.bands = bands
        narrow = _in_bfloat16(recorded)
        assert narrow == any(value == 0 for *_, value in bands)


def _in_bfloat16(recorded: Recorded) -> bool:
    with recorded.as_model() as there:
        part = rerun._part(recorded, there, recorded.header.engine_config(), then=True)
        observed = part._as_recorded()
        key = next(iter(observed.outputs))
        exact = recorded.tensors["0.exact"]
        observed.outputs[key] = dict(enumerate(exact.bfloat16()))
        observed.inputs[key] = {p: row.bfloat16() for p, row in observed.inputs[key].items()}
        judgement, _ = part._judged(observed, torch.bfloat16)
        return part._verdict("x", judgement).wrong


# -- the command -----------------------------------------------------------------------


def test_the_command(failed: Path, made: Made, run: Run) -> None:
    code, out, _ = run("replay", failed)
    assert code == 0
    assert out.startswith("check     modes/mixed step: requests that arrive while others decode")
    assert "record    judged wrong: mixer at position 0: off by " in out
    assert "here      as it was scheduled: right; mixer: off by " in out
    assert out.endswith("verdict   right now\n")
    with BY_ID["causal-off-by-one"].seeded():
        code, out, _ = run("replay", failed, "--model", made("v3-near")[0], "--json")
        assert code == 1
        assert '"verdict": "still wrong"' in out
        assert run("replay", failed, "--op", "mla_prefill=reference")[0] == 0
    code, out, _ = run("replay", failed, "--op", "mla_prefill=nothing")
    assert code == 2
    assert "not run   the part alone: op 'mla_prefill' has no implementation 'nothing'" in out
    assert run("replay", failed.parent / "nothing")[0] == 2
