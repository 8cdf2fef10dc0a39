"""`trueline bench memory`, on a model that is small enough for a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trueline.bench import formats, memory
from trueline.bench.footprint import tensor_bytes
from trueline.bench.rank_load import RankLoad, load_rank_alone, page_bytes, stretches
from trueline.cli import main
from trueline.device import resident_bytes
from trueline.errors import UsageError
from trueline.weights.checkpoint import Checkpoint, StoredTensor
from trueline.weights.rank_ledger import HeldTensor

Tiny = Callable[..., Path]
needs_proc = pytest.mark.skipif(resident_bytes() is None, reason="needs /proc")


def bench(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "memory", *map(str, arguments)])
    return int(caught.value.code or 0)


@needs_proc
@pytest.mark.parametrize("process", [pytest.param("own", marks=pytest.mark.slow), "this"])
@pytest.mark.parametrize(
    ("family", "name", "whole"),
    [
        ("deepseek_v3", "block-fp8", False),
        ("deepseek_v3", "int4", True),
        ("deepseek_v4", "fp4", False),
    ],
)
def test_files_are_written_loaded_and_deleted(
    family: str,
    name: str,
    whole: bool,
    process: str,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_attention_heads": 8,
        "n_routed_experts": 8,
    }
    keys |= {"o_groups": 4} if family == "deepseek_v4" else {"intermediate_size": 88}
    model = str(tiny(family, keys=keys, dtype="bfloat16"))
    monkeypatch.setitem(formats.PUBLISHED, model, name)
    monkeypatch.setattr(memory, "SHARD_BYTES", 500_000)
    if process == "this":  # which may have been larger before, and has read the files

        def load(at: Path, rank: int, size: int, whole: bool) -> RankLoad:
            found = load_rank_alone(at, rank, size, expert_parallel=whole)
            return replace(found, peak_bytes=12_000_000)

        monkeypatch.setattr(memory, "_load", load)
    options = ("--tensor-parallel-size", 2, *(["--enable-expert-parallel"] if whole else []))
    given = ("--model", model, "--layers", 3, "--directory", tmp_path, "--json")
    assert bench(*given, *options) == 0
    assert list(tmp_path.iterdir()) == []
    alone, *ranks = json.loads(capsys.readouterr().out)
    assert "load" not in alone  # one level
    assert [(each["rank"], each["size"]) for each in (alone, *ranks)] == [(0, 1), (0, 2), (1, 2)]
    for each in (alone, *ranks):
        assert (each["layers"], each["device"], each["met"]) == (3, "cpu", True)
        assert 0 < each["largest_file"] < each["checkpoint_bytes"]
        assert 0 < each["peak_bytes"] < each["limit"]
        assert each["limit"] == each["loaded_bytes"] + each["largest_file"] + (1 << 30)
        assert each["slice_bytes"] <= each["page_bytes"]
    held = [each["slice_bytes"] for each in ranks]
    headers = alone["checkpoint_bytes"] - alone["slice_bytes"]
    assert 0 < headers < 0.1 * alone["checkpoint_bytes"]
    most = 0.8 if family == "deepseek_v4" else 0.7  # some are replicated: compressors, say
    assert alone["slice_bytes"] < sum(held)
    assert max(held) < most * alone["slice_bytes"]
    assert all(each["loaded_bytes"] < (most + 0.1) * alone["loaded_bytes"] for each in ranks)


LOAD = RankLoad(
    rank=3,
    size=8,
    device="cpu",
    slice_bytes=1000 << 20,
    page_bytes=1100 << 20,
    stretches=5,
    read_bytes=1110 << 20,
    loaded_bytes=7 << 30,
    peak_bytes=10 << 30,
    seconds=1.0,
)
FIGURES = memory.LoadFigures(
    model="v32s",
    format="block-fp8",
    layers=2,
    checkpoint_bytes=7 << 30,
    largest_file=2 << 30,
    readahead=1 << 20,
    load=LOAD,
)


def with_load(**changes: object) -> memory.LoadFigures:
    return replace(FIGURES, load=replace(LOAD, **changes))  # type: ignore[arg-type]


def test_too_much_is_not_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert FIGURES.met
    assert not with_load(peak_bytes=LOAD.peak_bytes + 1).met
    assert not with_load(device="cuda").met
    worse = with_load(peak_bytes=11 << 30)
    monkeypatch.setattr(memory, "measure_load", lambda *_, **__: [FIGURES, worse])
    assert bench("--model", "v32s") == 1
    shown = capsys.readouterr()
    assert "11.81" in shown.out
    assert "cache" not in shown.err


def test_reading_what_others_hold_is_not_met() -> None:
    """Whole pages, and a window of readahead on both sides of every stretch; at most the files."""
    limit = FIGURES.read_limit
    assert limit == (1100 + 2 * 5 + 256) << 20
    assert with_load(read_bytes=limit).met
    assert not with_load(read_bytes=limit + 1).met
    assert with_load(read_bytes=None).met
    assert replace(with_load(read_bytes=limit + 1), readahead=None).met
    assert replace(FIGURES, readahead=8 << 30).read_limit == (7 << 30) + (256 << 20)


def test_files_that_stayed_in_the_page_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not with_load(read_bytes=LOAD.slice_bytes).cached
    cached = with_load(read_bytes=LOAD.slice_bytes - 1)
    assert cached.cached
    assert cached.met
    monkeypatch.setattr(memory, "measure_load", lambda *_, **__: [FIGURES, cached])
    assert bench("--model", "v32s") == 0
    assert "could not be put out of the cache" in capsys.readouterr().err


def tensor(file: str, begin: int, end: int) -> StoredTensor:
    return StoredTensor(
        name="t", dtype="U8", shape=(end - begin,), file=Path(file), begin=begin, end=end
    )


def test_pages_and_stretches_count_once() -> None:
    """Two slices of a page, a tensor between that is not held, and a second file."""
    a, b, other = tensor("x", 8, 40), tensor("x", 40, 60), tensor("x", 60, 130)
    c, d = tensor("x", 130, 140), tensor("y", 130, 300)
    held = [
        HeldTensor(d, (slice(0, 170),)),
        HeldTensor(a, (slice(0, 8),)),
        HeldTensor(a, (slice(20, 24),)),
        HeldTensor(b, (slice(0, 20),)),
        HeldTensor(c, (slice(0, 1),)),
    ]
    # of x: [0, 16), [16, 32), [32, 64), [128, 144); of y: [128, 304)
    assert page_bytes(held, 16) == 16 + 16 + 32 + 16 + 176
    every = {str(i): each for i, each in enumerate((a, b, other, c, d))}
    checkpoint = Checkpoint(Path(), (Path("x"), Path("y")), every)
    assert stretches(checkpoint, held) == 3 + 2


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 20"):
        memory.check_disk(tmp_path, int(21e9))
    assert bench("--model", "v3") == 2
    assert bench("--layers", "0") == 2
    assert bench("--tensor-parallel-size", "0") == 2
    assert bench("--tensor-parallel-size", "3", "--directory", tmp_path) == 2
    assert list(tmp_path.iterdir()) == []


def test_memory_that_several_tensors_share_counts_once() -> None:
    whole = torch.zeros(100)
    assert tensor_bytes({"a": [whole, whole[:10]], "b": (whole.view(10, 10), torch.ones(3))}) == 412
