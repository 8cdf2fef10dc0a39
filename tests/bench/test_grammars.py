"""What `trueline bench grammars` measures is what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trueline.bench.grammars import GrammarCost, Phase, measure_grammars, schema, stand_in_tokens
from trueline.bench.workload import bench_engine
from trueline.cli import main
from trueline.engine.messages import CoreOutput
from trueline.grammar.compiled import json_grammar

Tiny = Callable[..., Path]


def test_half_of_the_streams_are_constrained_in_one_mode(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench_engine(str(tiny("deepseek_v3")), max_num_seqs=4, max_model_len=256)
    said: dict[str, list[int]] = {}
    step = engine.core.step

    def watched() -> list[CoreOutput]:
        outputs = step()
        for output in outputs:
            said.setdefault(output.request_id, []).extend(output.token_ids)
        return outputs

    monkeypatch.setattr(engine.core, "step", watched)
    cost = measure_grammars(engine, streams=4, rounds=2, steps=6, arrivals=3)
    assert [len(each) for each in (cost.without, cost.half)] == [2, 2]
    assert all(phase.masks_ms > 0 for phase in cost.half)
    grammars = engine.core.grammars
    # each of the second half, and each that arrives, unless its phase ends before
    assert 2 * (2 + 1) <= grammars.num_compiled <= 2 * (2 + 2)
    assert cost.compile_ms > 0
    assert not engine.core.requests
    tokens = stand_in_tokens(engine.spec.vocab.total)
    # the last request of a name in the second half began in the mode without: before it, JSON
    assert any(tokens[t] in (b"[", b" ", b"\n", b"\t", b"\r") for t in said["stream-3"])
    steps = 2 * 2 * 6
    assert len(said["stream-0"]) >= steps
    assert sum(len(p.gaps_ms) for p in (*cost.without, *cost.half)) == 2 * (steps - 4)


def test_ratios_are_of_the_same_round_and_the_plain_streams() -> None:
    without = [Phase(100.0, [1.0] * 99 + [9.0]), Phase(200.0, [1.0] * 100)]
    half = [Phase(90.0, [2.0] * 100), Phase(200.0, [2.0] * 100)]
    found = GrammarCost(32, without, half, 3.0)
    assert found.throughput_ratios == [0.9, 1.0]
    assert found.as_json()["throughput_ratio"] == 0.95
    assert found.p99_ms == (pytest.approx(1.0), 2.0)


def test_schemas_are_honoured_and_all_different() -> None:
    assert len({json_grammar(schema(i)) for i in range(8)}) == 8


@pytest.mark.parametrize("count", [311, 40_000])
def test_the_stand_in_has_all_bytes_and_nothing_twice(count: int) -> None:
    tokens = stand_in_tokens(count)
    assert len(tokens) == len(set(tokens)) == count
    assert {bytes([each]) for each in range(256)} <= set(tokens)


def test_the_verb_prints_every_phase(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny("deepseek_v3"))
    options = ["--streams", "2", "--rounds", "2", "--steps", "4", "--json"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["bench", "grammars", model, *options])
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["streams"], found["arrivals"], len(found["half"])) == (2, 0, 2)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["bench", "grammars", model, "--streams", "1"])
