"""`trueline verify` as a command."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from trueline.cli import main
from trueline.config import EngineConfig
from trueline.verify.cases import make_subject
from trueline.verify.faults.table import FAULTS
from trueline.verify.report import FaultRow, Place, Power, Status, read
from trueline.verify.suite import faults as suite_faults
from trueline.verify.suite import numbers, ops, power, preflight
from trueline.verify.suite.outcome import Todo
from trueline.verify.suite.run import verify


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_subject("v3-near", tmp_path_factory.mktemp("verify") / "tiny-v3").model


def code_of(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *map(str, arguments)])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_a_right_model(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(tiny, "--smoke", "--only", "layers", "--quiet", "--out", tmp_path / "out") == 0
    shown = capsys.readouterr()
    assert "PASSED" in shown.out
    assert f"{tiny}: about " in shown.err  # before the checks
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "tiny-v3.json", "tiny-v3.html", "tiny-v3.xml"
    }  # fmt: skip


def test_a_wrong_one(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = next(fault for fault in FAULTS if fault.id == "latent-unnormed")
    with fault.seeded():
        assert code_of(tiny, "--smoke", "--only", "layers", "--json") == 1
    shown = capsys.readouterr()
    assert "FAILED layers/each half: layer 0, mixer" in shown.err  # at once
    report = json.loads(shown.out)
    assert [check["status"] for check in report["checks"]] == ["failed"]
    assert report["checks"][0]["place"]["layer"] == 0
    assert report["checks"][0]["place"]["part"] == "mixer"


def test_an_interrupted_run_reports_what_it_has(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Iterator[Todo]:
        for name in ("modes/one", "modes/two"):
            yield Todo(name, "modes", "", lambda: os.kill(os.getpid(), signal.SIGTERM))  # type: ignore[arg-type,return-value]

    monkeypatch.setattr(numbers, "mode_checks", interrupted)
    handler = signal.getsignal(signal.SIGTERM)
    given = (tiny, tiny, "--only", "logits", "--only", "modes", "--out", tmp_path)
    assert code_of(*given) == 130
    assert signal.getsignal(signal.SIGTERM) is handler
    shown = capsys.readouterr().out
    assert shown.count("INTERRUPTED") == 1  # the second model is not begun
    report = read(tmp_path / "tiny-v3.json")
    assert report.interrupted
    assert not report.passed
    assert [check.status for check in report.checks] == [Status.PASSED, *[Status.NOT_COVERED] * 2]
    assert report.checks[-1].evidence == "the run was interrupted before it"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("broken")])
def test_power_that_is_not_measured_to_its_end(
    error: BaseException, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(*_: object) -> Iterator[Power]:
        yield Power(place=Place(), what="", smallest=1.0, unseen=None, caught_by=None, named=None)
        raise error

    monkeypatch.setattr(power, "measure", some)
    for module, name in ((numbers, "mode_checks"), (ops, "checks"), (preflight, "checks")):
        monkeypatch.setattr(module, name, lambda *_: iter(()))
    report = verify(tiny, EngineConfig())
    assert len(report.power) == 1
    assert not report.passed
    assert report.interrupted == isinstance(error, KeyboardInterrupt)
    assert report.interrupted or "broken" in report.failed[0].evidence


def test_interrupted_among_known_bugs(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(*_: object) -> Iterator[FaultRow]:
        yield FaultRow(id="first", what="", outcome="caught")
        raise KeyboardInterrupt

    monkeypatch.setattr(suite_faults, "fault_rows", some)
    assert code_of(tiny, "--smoke", "--only", "logits", "--faults", "--json") == 130
    report = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in report["faults"]] == ["first"]
    assert report["interrupted"]


def test_known_bugs(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--faults",
        "--fault",
        "latent-unnormed",
        "--fault",
        "ling-names",
        "--only",
        "preflight",
    )
    assert code_of(tiny, *given, "--smoke", "--json") == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)["faults"]}
    assert rows["latent-unnormed"]["outcome"] == "caught"
    assert rows["latent-unnormed"]["layer"] == "all"
    assert rows["ling-names"]["outcome"] == "no effect"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--smoke", "--full"), "--smoke and --full"),
        (("--fault", "x"), "--fault is for --faults"),
        (("--faults", "--fault", "latent-unorm"), "latent-unnormed"),
        (("--only", "mode"), "--only mode"),
        (("--out", "/dev/null/x"), "--out /dev/null/x"),
    ],
)
def test_what_is_refused(
    tiny: Path, given: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(tiny, *given) == 2
    assert words in capsys.readouterr().err
