"""Which kernels run attention on a GPU, and why not others, is printed with the plan."""

from __future__ import annotations

import pytest

from paths import CONFIGS
from trueline import device
from trueline.config import EngineConfig
from trueline.device import Device
from trueline.models import read_model
from trueline.plan.plan import make_plan

HOPPER, AMPERE = (9, 0), (8, 0)
ALL = ("mla_decode", "mla_prefill", "sparse_mla")


@pytest.mark.parametrize(
    ("name", "capability", "told"),
    [
        ("v32s", HOPPER, dict.fromkeys(ALL, "hopper (preferred, and runs here)")),
        ("v32s", AMPERE, dict.fromkeys(ALL, "triton (not hopper: needs compute capability 9.0)")),
        (
            "v2lite",
            HOPPER,
            {
                "mla_decode": "triton (not hopper: works on 64 heads at a time: with 16, half or "
                "more is padding)",
                "mla_prefill": "hopper (preferred, and runs here)",
            },
        ),
    ],
)
def test_which_attention_kernel_runs_is_printed(
    name: str, capability: tuple[int, int], told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "interpreting", lambda: False)
    gpu = Device(
        kind="cuda",
        name="some",
        threads=1,
        free_memory=140 << 30,
        total_memory=140 << 30,
        compute_capability=capability,
    )
    plan = make_plan(read_model(CONFIGS / name), EngineConfig(device="cuda"), gpu)
    lines = list(plan.lines())
    for op, line in told.items():
        assert f"{op:<12} {line}" in lines
    assert plan.graphs
