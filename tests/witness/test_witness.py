"""`trueline witness` on random weights: nobody answers rightly, so that what is tested is whether
faults act, whether runs repeat themselves, and what is said of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from trueline.cli import main
from trueline.engine import failures
from trueline.engine.params import SamplingParams
from trueline.models import read_model
from trueline.spec.mixer import MLASpec
from trueline.tasks.stories import split_of
from trueline.utils import builtin
from trueline.utils.builtin import BUILTIN_MODELS, DEFAULT_MODEL, SAMPLE_PROBLEM
from trueline.verify.checks import CHECKS
from trueline.verify.faults import Fault
from trueline.verify.faults.table import FAULTS
from trueline.witness import measure, stories
from trueline.witness.figure import draw
from trueline.witness.measure import Answers, ask_alone, ask_together
from trueline.witness.report import report
from trueline.witness.run import ProblemSets, WitnessFigures, engine_of, num_answers, run
from trueline.witness.stories import STORIES, STORY_FAULTS, UNSEEN, StoryFault, switched_on

Tiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def installed(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights under the names of the built-in models, and short answers."""
    for model in BUILTIN_MODELS.values():
        (tmp_path / model.name).symlink_to(tiny(model.family, dtype="bfloat16"))
    monkeypatch.setattr(builtin, "FOLDER", tmp_path)
    monkeypatch.setattr(
        measure, "PARAMS", SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
    )


def figures(*names: str) -> WitnessFigures:
    models = [BUILTIN_MODELS[name] for name in names]
    sets = ProblemSets.draw(8, 0)
    asked = 0

    def report() -> None:
        nonlocal asked
        asked += 1

    found = run(models, sets, "cpu", report)
    assert 0 < asked <= num_answers(models, sets)
    return found


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_every_fault_acts_or_says_why_not(name: str) -> None:
    found = figures(name)
    (model,) = found["models"]
    assert model["family"] == BUILTIN_MODELS[name].family
    assert model["right"]["arithmetic"]["answers_differ"] == 0
    rows = model["faults"]
    assert [row["what"] for row in rows] == [f.what for f in STORY_FAULTS if f.model == name]
    for row in rows:
        assert row["acted"] == (row["not_covered"] is None), row["what"]
        if row["acted"]:
            assert min(row["calls"].values()) > 0
            assert row["with_fault"]["arithmetic"]["items"] == 8
    assert any(row["acted"] for row in rows)
    assert json.loads(json.dumps(found))
    assert ElementTree.fromstring(draw(found)).tag.endswith("svg")
    assert max(map(len, report(found, 80).splitlines())) <= 80


def test_a_run_repeats_itself() -> None:
    assert figures("witness-k25") == figures("witness-k25")


def test_batch_invariant_answers_are_those_given_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["witness", "witness-k25", "--items", "4", "--long-items", "0"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--batch-invariant", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["batch_invariant"] is True
    monkeypatch.setattr(Answers, "differing", lambda self, other: 1)
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--batch-invariant"])
    assert ended.value.code == 1
    assert "1 answers in the batch differ from those alone" in capsys.readouterr().err


def test_decodes_and_prefills_share_steps_in_the_batch() -> None:
    problems = ProblemSets.draw(12, 0).problems
    with engine_of(BUILTIN_MODELS["witness-ling"], {"device": "cpu"}) as engine:
        together = ask_together(engine, problems, lambda: None)
        alone = ask_alone(engine, problems, lambda: None)
    assert together.texts == alone.texts
    assert together.mixed_steps > 0


def test_the_batch_is_never_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = ProblemSets.draw(12, 0).problems
    monkeypatch.setattr(measure, "BATCH", 3)
    in_flight, seen = set(), []
    with engine_of(BUILTIN_MODELS["witness-v3"], {"device": "cpu"}) as engine:
        add, step = engine.add_request, engine.step

        def watched_add(name: str, *given: Any) -> None:
            in_flight.add(name)
            seen.append(len(in_flight))
            add(name, *given)

        def watched_step() -> list[Any]:
            outputs = step()
            in_flight.difference_update(one.request_id for one in outputs if one.finished)
            return outputs

        monkeypatch.setattr(engine, "add_request", watched_add)
        monkeypatch.setattr(engine, "step", watched_step)
        ask_together(engine, problems, lambda: None)
    assert max(seen) == 3


def test_a_fault_of_mixed_batches_leaves_single_requests_alone() -> None:
    (fault,) = [fault for fault in STORY_FAULTS if fault.only_mixed]
    problems = ProblemSets.draw(6, 0).problems
    model = BUILTIN_MODELS[fault.model]
    with engine_of(model, {"device": "cpu"}) as engine:
        right = ask_alone(engine, problems, lambda: None)
    with switched_on(fault), engine_of(model, {"device": "cpu"}) as engine:
        assert ask_alone(engine, problems, lambda: None).texts == right.texts
        assert ask_together(engine, problems, lambda: None).texts != right.texts


def test_what_cannot_be_shown_here_says_why() -> None:
    spec = read_model(BUILTIN_MODELS["witness-ling"].path)
    reasons = {
        fault.what: fault.not_covered(spec, device)
        for fault in STORY_FAULTS
        for device in ("cpu", "cuda")
        if fault.not_covered(spec, device)
    }
    assert "needs a GPU" in str(reasons["work list sized from the unpadded heads"])
    assert "a GPU has the real one" in str(reasons["half of the heads zero in decode"])
    assert reasons["softmax scale without mscale²"] == "this model has no mscale²"
    with_mscale = read_model(BUILTIN_MODELS["witness-v3"].path)
    assert all(f.not_covered(with_mscale, "cpu") is None for f in STORY_FAULTS if f.story == 3)


@contextmanager
def broken_as(make: Callable[[Any], object], model: str = DEFAULT_MODEL) -> Iterator[StoryFault]:
    """The first fault of a model on a CPU, but it breaks something else."""
    here = [fault for fault in STORY_FAULTS if fault.device != "cuda"]
    fault = next(fault for fault in here if fault.model == model)
    known = dict(stories._FAULTS)
    try:
        for name in fault.faults:
            stories._FAULTS[name] = replace(known[name], broken=make)
        yield fault
    finally:
        stories._FAULTS.update(known)


def test_only_numbers_that_change_are_counted() -> None:
    spec = read_model(BUILTIN_MODELS[DEFAULT_MODEL].path).layers[0].mixer
    assert isinstance(spec, MLASpec)
    with broken_as(lambda original: property(original.__get__)) as fault:
        with switched_on(fault) as counts:
            assert spec.softmax_scale > 0
        assert not counts.total()
    with switched_on(fault) as counts:
        assert spec.softmax_scale > 0
    assert counts.keys() == set(fault.faults)


def test_a_fault_that_does_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """It is called, and returns what was right."""
    harmless = broken_as(lambda original: lambda *given: original(*given), "witness-k25")
    with harmless, pytest.raises(SystemExit) as ended:
        main(["witness", "witness-k25", "--items", "4", "--long-items", "0"])
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert out.count("NO EFFECT") == 1
    assert "changed no answer: the fault does not act" in err


def test_a_relative_that_changes_no_answer_has_acted_where_logprobs_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Few problems may not show a weak fault; one that nothing came of is told."""
    arguments = ["witness", "witness-ling", "--items", "4", "--long-items", "0"]
    known = stories._FAULTS["spec-scale-of-cache-row"]
    (weak,) = [one for one in STORY_FAULTS if one.story == 3 and one.model == "witness-ling"]
    for factor, code, note in ((1 + 1e-6, 0, "logprobs changed, and no"), (1, 1, "NO EFFECT")):

        def scaled(original: property, factor: float = factor) -> property:
            return property(lambda spec: original.__get__(spec) * factor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(stories._FAULTS, known.id, replace(known, broken=scaled))
            patch.setattr("trueline.witness.run.STORY_FAULTS", (weak,))
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        out, err = capsys.readouterr()
        assert ended.value.code == code, err
        assert note in out


def test_every_second_problem_is_asked_alone() -> None:
    sets = ProblemSets.draw(8, 3)
    assert sets.places_alone() == [0, 2, 4, 6, 8, 10]
    alone = sets.only(sets.places_alone())
    assert (len(alone.problems), alone.num_arithmetic) == (6, 4)
    right = figures("witness-k25")["models"][0]["right"]["arithmetic"]
    assert (right["alone"]["items"], right["batch"]["items"]) == (4, 8)


def test_a_fault_that_stops_the_engine_has_no_right_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "MOST_IN_A_ROW", 0)

    def stops(original: object) -> property:
        def read(spec: object) -> float:
            raise ValueError("no such grid")

        return property(read)

    with broken_as(stops):
        found = figures(DEFAULT_MODEL)
    row = found["models"][0]["faults"][0]
    assert "no such grid" in str(row["stopped"])
    assert row["with_fault"]["arithmetic"]["right"] == 0
    text = report(found, 80)
    said = (
        "no answer is right: the engine cannot go on: 1 steps in a row have failed, the last with"
    )
    assert f"{said} ValueError: no such grid" in " ".join(text.split())


def test_what_cannot_be_counted_is_no_storys_fault() -> None:
    with (
        broken_as(lambda original: 1.0) as fault,
        pytest.raises(AssertionError, match="cannot be counted"),
        switched_on(fault),
    ):
        pass


def test_the_stories_are_complete() -> None:
    known: dict[str, Fault] = {fault.id: fault for fault in FAULTS}
    assert {name for fault in STORY_FAULTS for name in fault.faults} <= known.keys()
    assert {fault.story for fault in STORY_FAULTS if fault.historical} == STORIES.keys()
    assert {fault.model for fault in STORY_FAULTS} == BUILTIN_MODELS.keys()
    for unseen in UNSEEN:
        assert unseen.check in CHECKS
    assert split_of(SAMPLE_PROBLEM) == "test"


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = ["--out", str(tmp_path / "w.json"), "--figure", str(tmp_path / "w.svg")]
    counts = ["--items", "4", "--long-items", "0"]
    with pytest.raises(SystemExit) as ended:
        main(["witness", "witness-k25", *counts, *files])
    assert ended.value.code == 0
    out, _ = capsys.readouterr()
    for part in ("in the batch of 64", "not covered", "needs a GPU", "(emulated)", "0 (0–49)"):
        assert part in out
    kept = json.loads((tmp_path / "w.json").read_text())
    assert [row["emulated"] for row in kept["models"][0]["faults"]] == [False, False, True]
    picture = (tmp_path / "w.svg").read_text()
    assert "half of the heads zero in decode (emulated)" in picture
    assert "not covered here" in picture


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nothing"], "accepted: witness-v3, "),
        (["--items", "0"], "numbers from 1 up"),
        (["--demo", "--items", "9"], "--demo takes --device and nothing else"),
        (["--demo", "witness-ling"], "--demo takes --device and nothing else"),
        (["--out", "/nowhere/w.json"], "/nowhere/w.json: not writable (No such file"),
        (["--figure", "/"], "/: not writable (Is a directory)"),
    ],
)
def test_wrong_input(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["witness", *arguments])
    assert ended.value.code == 2
    assert part in capsys.readouterr().err


def test_the_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueline.witness.demo.ITEMS", 4)
    with pytest.raises(SystemExit) as ended:
        main(["witness", "--demo"])
    assert ended.value.code == 0
    out, _ = capsys.readouterr()
    assert f"> {SAMPLE_PROBLEM}\n" in out
    assert "4 more problems: 0 right (0 %)" in out
    assert "the same with a bug switched on: 0 right (0 %)" in out
    scales = re.search(r"multiplied by (\S+)\ninstead of (\S+)\.", out)
    assert scales is not None
    assert float(scales[1]) < float(scales[2])
