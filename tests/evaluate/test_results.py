"""Runs that are interrupted, resumed, refused; and what two results say of each other."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from trueline import SamplingParams
from trueline.errors import UsageError
from trueline.evaluate import results
from trueline.evaluate.diff import diff, load
from trueline.evaluate.figures import bucket, summarise
from trueline.evaluate.items import Item
from trueline.evaluate.match import MATCHES
from trueline.evaluate.prompts import PromptFormat
from trueline.evaluate.report import print_diff
from trueline.evaluate.results import NotWritten, ResultsDirectory
from trueline.evaluate.run import (
    EvalOutput,
    EvalRequest,
    Evaluation,
    Report,
    make_requests,
    run_requests,
    sample_seed,
    score,
)
from trueline.evaluate.samples import Sample, encode, read_samples

ITEMS = [
    Item(id=f"i{n}", question=f"naïve {n}", answer=str(n), category="odd" if n % 2 else "even")
    for n in range(7)
]
MATCH = {"number": MATCHES["number"]}
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=1, seed=5)
SETTINGS = {"task": "t", "sampling": {"temperature": 0.0, "stop": ()}, "model": {"name": "m"}}


class Killed(BaseException):
    pass


@dataclass
class Script:
    """A model whose outputs follow from the request; it finishes them in another order."""

    kill_after: int | None = None
    failing: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    asked: list[tuple[str, int]] = field(default_factory=list)

    def run(self, requests: Sequence[EvalRequest], report: Report) -> None:
        for request in reversed(requests):
            if self.kill_after == len(self.asked):
                raise Killed
            self.asked.append((request.item.id, request.sample))
            report(request, self.output(request))

    def plan_lines(self) -> list[str]:
        return ["device       a test's"]

    def output(self, request: EvalRequest) -> EvalOutput:
        if request.item.id in self.failing:
            return EvalOutput(error="HTTP 500: broken")
        said = "none" if request.item.id in self.wrong else request.item.answer
        return EvalOutput(
            text=f"é is {said}\n", prompt_tokens=40 * (1 + int(request.item.answer)),
            generated_tokens=3, finish_reason="stop",
        )  # fmt: skip


def evaluated(directory: Path, script: Script, samples: int = 1, **settings: Any) -> Evaluation:
    params = GREEDY if samples == 1 else DRAWN
    requests = make_requests(ITEMS, PromptFormat(chat=True), params, samples)
    with ResultsDirectory.open(directory, SETTINGS | settings) as kept:
        evaluation = run_requests(script, requests, MATCH, known=kept.known, keep=kept.append)
        kept.finish(evaluation)
    return evaluation


def kept_in(directory: Path) -> tuple[bytes, Any]:
    results = json.loads((directory / "results.json").read_text())
    assert results.pop("speed")["seconds"] > 0
    assert results.pop("plan") == ["device       a test's"]
    return (directory / "samples.jsonl").read_bytes(), results


@pytest.mark.parametrize("samples", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, samples: int) -> None:
    whole = tmp_path / "whole"
    found = evaluated(whole, Script(), samples)
    assert [each.key for each in found.samples] == every_sample(samples)
    for count in range(len(ITEMS) * samples):
        directory = tmp_path / str(count)
        first, second = Script(kill_after=count), Script()
        with pytest.raises(Killed):
            evaluated(directory, first, samples)
        evaluated(directory, second, samples)
        assert kept_in(directory) == kept_in(whole)
        assert sorted(first.asked + second.asked) == every_sample(samples)
    assert "figures" in kept_in(whole)[1]


def every_sample(samples: int) -> list[tuple[str, int]]:
    return [(item.id, sample) for item in ITEMS for sample in range(samples)]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    evaluated(whole, Script())
    content = (whole / "samples.jsonl").read_bytes()
    start = content[:-1].rindex(b"\n") + 1
    for cut in range(start, len(content), 7):
        (whole / "samples.jsonl").write_bytes(content[:cut])
        again = Script()
        with ResultsDirectory.open(whole, SETTINGS) as kept:
            assert any("last line is torn" in note for note in kept.notes) == (cut > start)
            assert (whole / "samples.jsonl").stat().st_size == start
        evaluated(whole, again)
        assert again.asked == [("i6", 0)]
        assert (whole / "samples.jsonl").read_bytes() == content


def test_a_damaged_line_elsewhere_is_an_error(tmp_path: Path) -> None:
    evaluated(tmp_path, Script())
    file = tmp_path / "samples.jsonl"
    for damage in (b"{}", b"\xff", b""):
        lines = file.read_bytes().split(b"\n")
        lines[2] = damage
        (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
        with pytest.raises(UsageError, match=r"bad.jsonl, line 3: not a sample"):
            read_samples(tmp_path / "bad.jsonl")


def test_items_in_error_are_tried_again(tmp_path: Path) -> None:
    first = evaluated(tmp_path / "a", Script(failing=("i2", "i5")))
    assert first.figures()["errors"] == 2
    assert first.figures()["matches"]["number"]["accuracy"] == pytest.approx(5 / 7)
    with ResultsDirectory.open(tmp_path / "a", SETTINGS) as kept:
        assert "2 ended in error and are tried again" in kept.notes[0]
    second = Script()
    evaluated(tmp_path / "a", second)
    assert sorted(second.asked) == [("i2", 0), ("i5", 0)]
    evaluated(tmp_path / "b", Script())
    assert kept_in(tmp_path / "a") == kept_in(tmp_path / "b")


def test_other_settings_are_named(tmp_path: Path) -> None:
    evaluated(tmp_path, Script())
    other = {"sampling": {"temperature": 0.7, "stop": ()}, "limit": 3}
    with pytest.raises(UsageError) as caught:
        evaluated(tmp_path, Script(), **other)
    assert "sampling.temperature: 0.0 there, 0.7 now; limit: None there, 3 now" in str(caught.value)
    assert "model" not in str(caught.value)
    (tmp_path / "results.json").unlink()
    with pytest.raises(UsageError, match=r"without its results\.json"):
        evaluated(tmp_path, Script())


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        ResultsDirectory.open(tmp_path, SETTINGS),
        pytest.raises(UsageError, match="another evaluation writes there"),
    ):
        evaluated(tmp_path, Script())
    evaluated(tmp_path, Script())


def test_a_complete_run_keeps_its_speed(tmp_path: Path) -> None:
    evaluated(tmp_path, Script())
    before = (tmp_path / "results.json").read_bytes()
    script = Script()
    evaluated(tmp_path, script)
    assert script.asked == []
    assert (tmp_path / "results.json").read_bytes() == before


def test_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not writable"):
        evaluated(tmp_path / "file", Script())
    (tmp_path / "samples.jsonl").mkdir()
    (tmp_path / "results.json").write_text(json.dumps({"settings": SETTINGS}))
    with pytest.raises(UsageError, match="not writable"):
        evaluated(tmp_path, Script())


def test_a_kill_before_the_first_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(results, "versions", killed)
        with pytest.raises(Killed):
            evaluated(tmp_path, Script())
    assert len(evaluated(tmp_path, Script()).samples) == len(ITEMS)


@pytest.mark.parametrize("most", [100, 700])
def test_a_full_disk(tmp_path: Path, most: int) -> None:
    """While the settings are written, and at a sample."""
    evaluated(tmp_path / "whole", Script())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        with pytest.raises(NotWritten, match=r"File too large.*the same command goes on"):
            evaluated(tmp_path / "full", Script())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "full").glob("*.new"))
    evaluated(tmp_path / "full", Script())
    assert kept_in(tmp_path / "full") == kept_in(tmp_path / "whole")


class InParts(FileIO):
    """As a disk that is nearly full: a write takes some of it, and says how much."""

    def write(self, data: Any) -> int:
        return super().write(data[:7])


def test_a_line_that_is_written_in_parts(tmp_path: Path) -> None:
    written = [sample("a", True, text="é"), sample("b", False)]
    with InParts(tmp_path / "samples.jsonl", "ab") as file:
        for each in written:
            ResultsDirectory(tmp_path, SETTINGS, file).append(each)
    assert read_samples(tmp_path / "samples.jsonl")[0] == written


def test_reasoning_that_the_template_opened() -> None:
    (request,) = make_requests(ITEMS[5:6], PromptFormat(chat=True), GREEDY, 1)
    for text, right in (("5", False), ("3</think>5", True)):
        output = EvalOutput(text=text, rendered_prompt="<|user|>?<|assistant|><think>\n")
        assert score(request, output, MATCH).right == {"number": right}
    assert score(request, EvalOutput(text="5", rendered_prompt="?"), MATCH).right["number"]


# -- requests and figures ------------------------------------------------------------------


def test_seeds_are_a_function_of_seed_item_and_sample() -> None:
    requests = make_requests(ITEMS, PromptFormat(chat=False), DRAWN, 3)
    seeds = {(each.item.id, each.sample): each.params.seed for each in requests}
    assert len(set(seeds.values())) == 21
    fewer = make_requests(ITEMS[4:], PromptFormat(chat=True), DRAWN, 2)
    for each in fewer:
        assert each.params.seed == seeds[each.item.id, each.sample]
        assert each.params.temperature == 1
    assert sample_seed(5, "i0", 1) != sample_seed(6, "i0", 1)
    assert make_requests(ITEMS, PromptFormat(chat=True), GREEDY, 1)[0].params.seed is None
    with pytest.raises(UsageError, match="--samples 2 with --temperature 0"):
        make_requests(ITEMS, PromptFormat(chat=True), GREEDY, 2)
    with pytest.raises(UsageError, match="--samples 0"):
        make_requests(ITEMS, PromptFormat(chat=True), GREEDY, 0)


def sample(item: str, right: bool, *, number: int = 0, text: str = "", **more: Any) -> Sample:
    given: dict[str, Any] = {
        "item": item, "sample": number, "category": "", "prompt": "p", "rendered_prompt": None,
        "prompt_tokens": 100, "answer": "1", "text": text or f"{right}", "reasoning": None,
        "extracted": {"m": None}, "right": {"m": right}, "generated_tokens": 2,
        "finish_reason": "stop", "error": None,
    }  # fmt: skip
    return Sample(**given | more)


def test_figures() -> None:
    samples = [
        sample("a", True, category="x", prompt_tokens=63),
        sample("b", False, category="x", prompt_tokens=64, finish_reason="length"),
        sample("c", True, category="y", prompt_tokens=130),
        sample("d", False, prompt_tokens=None, finish_reason="error", error="HTTP 500"),
    ]
    figures = summarise(samples, 1)
    assert (figures["items"], figures["errors"], figures["first_error"]) == (4, 1, "HTTP 500")
    assert figures["matches"]["m"]["accuracy"] == 0.5
    assert figures["matches"]["m"]["right"] == 2
    assert figures["finish_reasons"] == {"error": 1, "length": 1, "stop": 2}
    shares = {n: part["matches"]["m"]["accuracy"] for n, part in figures["categories"].items()}
    assert shares == {"x": 0.5, "y": 1.0}
    assert list(figures["prompt_lengths"]) == ["1–63", "64–127", "128–255", "unknown"]
    assert (figures["prompt_tokens"], figures["generated_tokens"]) == (257, 8)


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 63, 64, 127, 128, 255, 256, 1023, 1024)] == [
        "1–63", "1–63", "64–127", "64–127", "128–255", "128–255", "256–511", "512–1023",
        "1024–2047"]  # fmt: skip


def test_accuracy_of_several_samples_is_by_item() -> None:
    rights = {"a": (True, True), "b": (True, False), "c": (False, False)}
    samples = [sample(i, r, number=n) for i, each in rights.items() for n, r in enumerate(each)]
    found = summarise(samples, 2)
    assert (found["items"], found["samples"]) == (3, 6)
    assert found["matches"]["m"]["accuracy"] == pytest.approx(0.5)
    assert found["matches"]["m"]["right"] == 3


def test_lines_have_no_times() -> None:
    one = encode(sample("a", True))
    assert one == encode(sample("a", True))
    assert one.endswith(b"\n")


# -- diff ----------------------------------------------------------------------------------


def test_diff() -> None:
    # both, only A (twice), only B (once), neither; the texts of two differ without a right one
    rights = (("1", True, "x"), ("2", True, "x"), ("3", True, "y"), ("4", False, "y"))
    a = [sample(item, right, category=category) for item, right, category in rights]
    a.append(sample("5", False))
    b = [sample(i, r) for i, r in (("5", False), ("4", True), ("3", False), ("2", False))]
    b.append(sample("1", True, text="other words"))
    found = diff(a, b, show=3)
    cells = (found["both"], found["only_a"], found["only_b"], found["neither"])
    assert (found["items"], *cells) == (5, 1, 2, 1, 1)
    assert (found["accuracy_a"], found["accuracy_b"]) == (0.6, 0.4)
    assert found["difference"] == pytest.approx(-0.2)
    assert found["interval"][0] < -0.2 < found["interval"][1]
    assert found["p"] == 1.0
    assert found["texts_differ"] == 4
    assert [one["item"] for one in found["differing"]] == ["2", "3", "4"]
    assert found["categories"].keys() == {"x", "y"}
    assert found["categories"]["x"]["only_a"] == 1
    assert diff(a, b, show=9)["differing"][3]["text_b"] == "other words"


def test_an_output_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_diff(Console(), diff([sample("a", True, text="5\0\x1b[2J\n6")], [sample("a", False)]))
    shown = capsys.readouterr().out
    assert "A (right): 5��[2J 6" in shown
    assert "\x1b" not in shown


def test_diff_of_several_samples() -> None:
    def of(rights: dict[str, str]) -> list[Sample]:
        return [
            sample(item, right == "1", number=number)
            for item, each in rights.items()
            for number, right in enumerate(each)
        ]

    found = diff(of({"a": "11", "b": "10", "c": "00", "d": "10"}),
                 of({"a": "11", "b": "11", "c": "00", "d": "01"}))  # fmt: skip
    cells = (found["both"], found["only_a"], found["only_b"], found["neither"])
    assert cells == (2, 0, 1, 1)
    assert found["difference"] == pytest.approx(0.125)


def test_diff_wants_the_same_items() -> None:
    a, b = ([sample(item, True) for item in items] for items in ("12", "234"))
    with pytest.raises(UsageError, match="2 samples are missing in A, 1 in B"):
        diff(a, b)
    for one, other, missing in ((a, a[1:], "0 samples are missing in A, 1 in B"),
                                (a[1:], a, "1 samples are missing in A, 0 in B")):  # fmt: skip
        with pytest.raises(UsageError, match=missing):
            diff(one, other)
    with pytest.raises(UsageError, match="1 have another answer"):
        diff(a, [sample("1", True, answer="2"), sample("2", True)])
    with pytest.raises(UsageError, match="--match n: accepted: m"):
        diff(a, a, "n")
    other = [replace(each, right={"k": True}) for each in a]
    with pytest.raises(UsageError, match="no match in common: A has m, B k"):
        diff(a, other)


def test_diff_reads_directories_and_files(tmp_path: Path) -> None:
    evaluated(tmp_path / "a", Script(failing=("i1",)))
    evaluated(tmp_path / "b", Script(wrong=("i3",)))
    found = diff(load(tmp_path / "a"), load(tmp_path / "b" / "samples.jsonl"))
    assert (found["errors_a"], found["errors_b"], found["only_a"], found["only_b"]) == (1, 0, 1, 1)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=r"accepted: a directory that has a samples\.jsonl"):
            load(path)
