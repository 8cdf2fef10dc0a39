"""`trueline verify` as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trueline.cli import main
from trueline.verify.cases import make_subject
from trueline.verify.faults.table import FAULTS


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
    report = json.loads(capsys.readouterr().out)
    assert [check["status"] for check in report["checks"]] == ["failed"]
    assert report["checks"][0]["place"]["layer"] == 0
    assert report["checks"][0]["place"]["part"] == "mixer"


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
