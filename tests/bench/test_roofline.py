"""The bytes that a decode step must move."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paths import CONFIGS
from trueline.bench.gpu.end_to_end import CELLS
from trueline.bench.gpu.roofline import READ, checkpoint_bytes, decode_bytes
from trueline.cache.kinds import AnyKind
from trueline.config import EngineConfig
from trueline.device import HOPPER, Device
from trueline.models import read_model
from trueline.plan.plan import make_plan
from trueline.spec.model import ModelSpec

H200 = Device(
    kind="cuda",
    name="NVIDIA H200",
    threads=1,
    free_memory=150 << 30,
    total_memory=150 << 30,
    compute_capability=HOPPER,
)
RECORDED = json.loads(CELLS.read_text())["decode"]


def bench_model(name: str) -> tuple[ModelSpec, tuple[AnyKind, ...]]:
    spec = read_model(CONFIGS / name)
    return spec, make_plan(spec, EngineConfig(device="cuda"), H200).kinds


@pytest.mark.parametrize("cell", RECORDED, ids=lambda c: f"{c['model']}-{c['B']}-{c['inp']}")
def test_bfloat16_has_the_recorded_rooflines(cell: dict[str, float]) -> None:
    """Those of cells.json were computed before there was this module."""
    spec, kinds = bench_model(str(cell["model"]))
    found = decode_bytes(spec, kinds, int(cell["B"]), int(cell["inp"] + cell["out"] / 2))
    assert 1e3 * found.seconds == pytest.approx(cell["roofline_ms"], rel=0.01)


def test_int4_experts_by_hand() -> None:
    """384 experts of 3 × 7,168 × 1,024 numbers, top-8, in five layers: half a byte and, for every
    32 of them, a scale of two bytes."""
    spec, kinds = bench_model("k25s")
    expert = 3 * 7168 * 1024 * (0.5 + 2 / 32)
    plain, _ = bench_model("k25s")
    plain = replace(plain, storage=None)
    chosen = 384 * (1 - (1 - 8 / 384) ** 16)
    ours, dense = (decode_bytes(each, kinds, 16, 100) for each in (spec, plain))
    assert dense.weights - ours.weights == pytest.approx(
        5 * chosen * (3 * 7168 * 1024 * 2 - expert), rel=1e-6
    )
    assert ours.cache == dense.cache == 16 * 100 * 6 * (512 + 64) * 2
    assert ours.seconds == (ours.weights + ours.cache) / READ
    whole = checkpoint_bytes(plain) - checkpoint_bytes(spec)
    assert whole == pytest.approx(5 * 384 * (3 * 7168 * 1024 * 2 - expert), rel=1e-9)


def test_compressed_cache_by_hand() -> None:
    """v4s has two layers of window, three that choose 512 of the entries of 4 tokens, three that
    see all entries of 128; rows of 512 numbers, index keys of 128, tails of float32."""
    spec, kinds = bench_model("v4s")
    row, key = 2 * 512, 2 * 128
    for context in (100, 2047, 2048, 2052, 32768):
        entries = context / 4
        window = 8 * min(context, 128) * row
        chosen = 3 * min(entries, 512) * row
        scored = 3 * (entries * key if context // 4 > 512 else 0)
        seen = 3 * context / 128 * row
        tails = 3 * 2 * 4 * (2 * (2 * 512) + 2 * (2 * 128) + 512)
        found = decode_bytes(spec, kinds, 1, context).cache
        assert found == pytest.approx(window + chosen + scored + seen + tails, abs=1)
