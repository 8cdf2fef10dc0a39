"""`trueline bench overhead`: its sums, its rounds, and all of it on a tiny model."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trueline.bench.overhead import machine
from trueline.bench.overhead import rounds as overhead
from trueline.bench.overhead.machine import CpuMeter, CpuUse
from trueline.bench.overhead.processes import flags
from trueline.bench.overhead.rounds import Overhead, Pair, Side, server_side, summarise
from trueline.cli import main
from trueline.client.load import Load
from trueline.client.measure import LoadRun
from trueline.client.record import Record
from trueline.client.wire import ServerError, TokenUsage
from trueline.text.detokenize import Detokenizer
from trueline.text.tokenizer import Tokenizer
from trueline.tiny.tokenizer import write_word_tokenizer
from trueline.utils import environment

Tiny = Callable[..., Path]


def pair(offline: float, server: float, others: float = 0.0, streams: int = 8) -> Pair:
    """Of 8 streams with 50 tokens: 400 tokens in so many seconds, the first after 1 and 2."""
    use = CpuUse({"client": 0.01, "front end": 0.02}, others)
    return Pair(streams, 50, Side(offline, 1.0), Side(server, 2.0, use))


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    pairs = [pair(4.0, 5.0), pair(10.0, 10.0), pair(4.0, 8.0), pair(4.0, 40.0, others=0.5),
             pair(4.0, 4.0, streams=1)]  # fmt: skip
    eight, one = summarise(pairs)
    assert (eight["streams"], eight["rounds"], eight["quiet_rounds"]) == (8, 4, 3)
    # each round: 0.8, 1.0 and 0.5; the noisy 0.1 does not count
    assert eight["ratio"] == 0.8
    assert (eight["ratio_low"], eight["ratio_high"]) == (0.5, 1.0)
    assert eight["offline_tokens_per_s"] == 100.0
    assert eight["server_tokens_per_s"] == 50.0
    # 392 tokens after the first: 3 s and 3 s, 9 and 8, 3 and 6
    assert eight["decode_ratio"] == 1.0
    assert (eight["offline_first_token_s"], eight["server_first_token_s"]) == (1.0, 2.0)
    assert eight["us_per_token"] == {"client": 200.0, "front end": 400.0}
    assert (one["streams"], one["ratio"], one["offline_tokens_per_s"]) == (1, 1.0, 12.5)


def test_without_a_quiet_round_all_count() -> None:
    (row,) = summarise([pair(4.0, 8.0, others=0.5), pair(4.0, 4.0, others=0.5)])
    assert (row["ratio"], row["quiet_rounds"]) == (0.75, 0)


def record(start: float, first: float | None, tokens: int, error: str | None = None) -> Record:
    usage = TokenUsage(completion_tokens=tokens)
    return Record(start=start, first=first, end=9.0, usage=usage, error=error, message="no")


def test_a_servers_run_counts_from_the_first_request() -> None:
    run = LoadRun(Load(2), [record(1.0, 1.5, 4), record(1.25, 3.0, 4)], seconds=8.0)
    assert server_side(run, 4, CpuUse()) == Side(8.0, 2.0)


@pytest.mark.parametrize(
    "bad", [record(1.0, 1.5, 3), record(1.0, None, 4), record(1.0, 1.5, 4, error="HTTP 503")]
)
def test_a_run_with_a_failed_or_short_answer_is_no_figure(bad: Record) -> None:
    with pytest.raises(ServerError):
        server_side(LoadRun(Load(2), [record(1.0, 1.5, 4), bad], seconds=8.0), 4, CpuUse())


class Scripted(Overhead):
    """Says when it is asked; every run takes a second, the first two beside others."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.bench: Any = type("Closed", (), {"close": lambda self: None})()
        self.shape: Any = type("Shape", (), {"output_len": 4})()

    async def _warm_up(self, streams: int) -> None:
        self.said.append(f"warm up {streams}")

    async def _calm(self) -> None:
        pass

    async def _side(self, name: str, streams: int) -> Side:
        self.said.append(f"{name} {streams}")
        return Side(1.0, 0.5, CpuUse({}, 1.0 if len(self.said) < 4 else 0.0))

    async def _offline(self, streams: int) -> Side:
        return await self._side("offline", streams)

    async def _through_server(self, streams: int) -> Side:
        return await self._side("server", streams)


def test_rounds_take_turns_and_noisy_ones_are_made_up_for() -> None:
    scripted = Scripted()
    told: list[Pair] = []
    pairs = asyncio.run(scripted.rounds((1, 8), 1, told.append))
    assert scripted.said == ["warm up 8", "offline 1", "server 1", "offline 8", "server 8",
                             "server 1", "offline 1"]  # fmt: skip
    assert pairs == told
    assert [each.is_quiet for each in pairs] == [False, True, True]


def test_others_are_what_we_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy, ours = itertools.count(100, 2), itertools.count(50, 3), itertools.count(7, 1)
    monkeypatch.setattr(machine.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(machine, "busy_seconds", lambda: float(next(busy)))
    monkeypatch.setattr(machine, "process_seconds", lambda pid: float(next(ours)))
    assert CpuMeter({"client": 1}).stop() == CpuUse({"client": 0.5}, 1.0)


def test_processor_time_is_read() -> None:
    before, everybody = environment.process_seconds(os.getpid()), environment.busy_seconds()
    while environment.process_seconds(os.getpid()) < before + 0.1:
        pass
    assert environment.busy_seconds() >= everybody + 0.05
    assert environment.process_seconds(2**30) == 0.0  # nobody has this number


def test_options_are_flags() -> None:
    options = {"dtype": "float32", "max_num_seqs": 8, "overlap": True, "batch_invariant": False}
    assert list(flags(options)) == ["--dtype", "float32", "--max-num-seqs", "8", "--overlap",
                                    "--no-batch-invariant"]  # fmt: skip


def test_every_word_token_has_text(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path, 3000)
    tokenizer = Tokenizer.load(tmp_path)
    text = Detokenizer(tokenizer, True)
    pieces = [text.push([token]) for token in (*range(3000), 5)]
    assert all(piece.startswith(" ") and piece[1:].isalpha() for piece in pieces)
    assert len(set(pieces)) == 3000
    assert pieces[-1] == pieces[5]
    assert tokenizer.token_bytes(3000) == b""


@pytest.mark.slow
def test_on_a_tiny_model(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "TRIES", 1)  # whatever else runs here
    monkeypatch.setattr(overhead, "PATIENCE", 1)
    command = ["bench", "overhead", str(tiny("deepseek_v3") / "config.json"), "--prompt-len", "8",
               "--output-len", "4", "--repeats", "2", "--streams", "1", "--streams", "3",
               "--out", f"{tmp_path}/out.json", "--plot", f"{tmp_path}/out.svg"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "decode ratio" in printed
    assert "front end" in printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["streams"] for row in found["rows"]] == [1, 3]
    assert [each["streams"] for each in found["rounds"]] == [1, 3, 1, 3]
    for row in found["rows"]:
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["server_tokens_per_s"] > 0
    assert "<svg" in (tmp_path / "out.svg").read_text()


@pytest.mark.parametrize("wrong", [["--streams", "0"], ["--repeats", "0"], ["--out", "no/such"]])
def test_wrong_options(wrong: list[str], tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "overhead", str(tiny("deepseek_v3")), *wrong])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert any(word in said for word in wrong)
