"""Options of the engine in `trueline verify`: all that runs has them, or it says why not."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.kinds.latent import Latent
from trueline.cache.kinds.lightning import LightningState
from trueline.config import EngineConfig
from trueline.errors import UsageError
from trueline.plan.plan import Plan
from trueline.verify.cases import CASES, make_subject
from trueline.verify.report import Status
from trueline.verify.suite.options import APPLIED, OWN, REFUSED, checks, require_covered
from trueline.verify.suite.outcome import carry_out
from trueline.verify.suite.run import Selection, verify
from trueline.verify.suite.session import Session

LAYERS = Selection(tier="smoke", only=("layers", "options"))


def made(name: str, tmp_path: Path, **options: Any) -> tuple[Path, EngineConfig]:
    case = CASES[name]
    model = make_subject(name, tmp_path / name).model
    return model, EngineConfig(**{"facts": case.facts, **case.options, **options})


def test_every_option_is_applied_or_named() -> None:
    """A new one belongs into one of the lists."""
    names = {item.name for item in fields(EngineConfig)}
    assert names == APPLIED | OWN.keys() | REFUSED.keys()
    assert not APPLIED & OWN.keys()
    assert not OWN.keys() & REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("load_format", {"load_format": "dummy"}),
        ("nnodes", {"nnodes": 2, "tensor_parallel_size": 2}),
        ("node_rank", {"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}),
        (
            "distributed_executor_backend",
            {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2},
        ),
    ],
)
def test_what_is_not_covered_is_refused_by_name(name: str, options: dict[str, Any]) -> None:
    """Before anything is loaded."""
    config = EngineConfig(**options)
    assert REFUSED[name][0](config)
    with pytest.raises(UsageError, match="verify does not cover it"):
        verify("no such model", config)


def test_ranks_of_one_machine_are_covered() -> None:
    config = EngineConfig(tensor_parallel_size=2)
    assert not any(refused(config) for refused, _ in REFUSED.values())
    require_covered(config)


SAMPLES: dict[str, dict[str, Any]] = {
    "v3-near": {
        "dtype": "bfloat16", "device": "cpu", "seed": 3, "max_num_seqs": 3, "block_size": 8,
        "max_num_batched_tokens": 64, "enable_prefix_caching": False, "batch_invariant": True,
        "num_gpu_blocks_override": 50, "kv_cache_dtype": "e4m3fn", "kv_cache_group_size": 16,
        "kv_cache_scale_fmt": "ue8m0", "overlap": True, "max_logprobs": 3, "poison": True,
        "ops": {"rope": "cpu"}, "canary_interval": 2, "engine_timeout": 50.0, "init_timeout": 90.0,
        "data_parallel_size": 2, "numerics": "weights",
    },
    "ling": {
        "mamba_cache_dtype": "float16", "num_state_slots": 9, "snapshot_spacing": 16,
        "kv_cache_memory_bytes": 40_000_000, "facts": {"latent_norm_eps": 1e-5},
    },
    "v32": {"index_cache_dtype": "e4m3fn", "index_cache_layout": "planar", "dtype": "float32"},
}  # fmt: skip
RANKS = {
    *("tensor_parallel_size", "enable_expert_parallel", "distributed_executor_backend"),
    *("debug_collectives", "data_parallel_rank"),
}
ELSEWHERE = {
    *("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"),
    *("master_addr", "master_port", "layers", "canary_report_dir"),
}
"""Accepted: 1; without effect on one machine; of a package; a directory."""


def effects(plan: Plan) -> dict[str, object]:
    """What a running engine shows of its options."""
    latent, index = plan.kind(Latent), plan.kind(IndexKeys)
    state = plan.kind(LightningState)
    found: dict[str, object] = {
        "dtype": str(plan.weight_dtype).removeprefix("torch."),
        "max_num_seqs": plan.limits.max_num_seqs,
        "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
        "block_size": plan.block_size,
        "num_gpu_blocks_override": plan.num_blocks - 1,
        "batch_invariant": plan.batch_invariant,
        "overlap": plan.limits.overlap,
        "ops": {"rope": plan.selections["rope"].name},
        "canary_interval": plan.canaries and plan.canaries.interval,
        "num_state_slots": plan.slots and plan.slots.num_slots - 1,
        "snapshot_spacing": plan.slots and plan.slots.spacing,
    }
    if latent is not None and latent.layout.fp8 is not None:
        fp8 = latent.layout.fp8
        found |= {
            "kv_cache_dtype": fp8.storage,
            "kv_cache_group_size": fp8.group,
            "kv_cache_scale_fmt": "ue8m0" if fp8.power_of_two else "float32",
        }
    if index is not None:
        found |= {
            "index_cache_dtype": index.layout.storage,
            "index_cache_layout": index.layout.kind,
        }
    if state is not None:
        found["mamba_cache_dtype"] = str(state.dtype).removeprefix("torch.")
    return found


@pytest.mark.parametrize("name", SAMPLES)
def test_options_reach_the_engine(name: str, tmp_path: Path) -> None:
    """That which runs, and what it is seen to do."""
    model, config = made(name, tmp_path, **SAMPLES[name])
    session = Session(name, model, config)
    with session.core() as core:
        found = effects(core.plan)
        for option, value in SAMPLES[name].items():
            assert getattr(core.config, option) == value, option
            assert found.get(option, value) == value, option
    outcomes = {todo.id: carry_out(todo) for todo in checks(session)}
    told = outcomes["options/engines"]
    assert told.status == Status.PASSED, told.evidence
    assert all(f"{option} = " in told.evidence for option in SAMPLES[name] if option != "device")
    if "data_parallel_size" in SAMPLES[name]:
        other = outcomes["options/other replicas"]
        assert other.status == Status.NOT_COVERED
        assert "what ran is replica 0" in other.evidence


def test_all_that_is_applied_has_a_sample() -> None:
    assert set().union(*SAMPLES.values()) | RANKS | ELSEWHERE == APPLIED


def test_an_option_that_is_dropped_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = made("v3-near", tmp_path, block_size=8)
    session = Session("v3-near", model, config)
    plain = Session.engine_config
    with session.core(block_size=4):
        pass
    (todo,) = checks(session)
    assert carry_out(todo).status == Status.PASSED, "a composition was about it"
    monkeypatch.setattr(
        Session, "engine_config", lambda self, **given: replace(plain(self, **given), block_size=4)
    )
    with session.core():
        pass
    check = carry_out(todo)
    assert check.status == Status.FAILED
    assert "block_size = 8 was given, and an engine has run with 4" in check.evidence


def test_every_engine_is_poisoned(tmp_path: Path) -> None:
    """--poison is of the run, and not of one composition."""
    model, config = made("v3-near", tmp_path, poison=True)
    report = verify(model, config, Selection(tier="smoke", only=("layers", "modes/*", "options")))
    assert report.passed, report.failed
    told = next(check for check in report.checks if check.id == "options/engines")
    assert "poison = True: 5 of 5 engines" in told.evidence


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"enable_expert_parallel": True}], ids=str)
def test_ranks_in_processes(options: dict[str, Any], tmp_path: Path) -> None:
    """Layers and modes on the user's own ranks, not on threads that stand for them."""
    model, config = made(
        "v3-ranks", tmp_path, tensor_parallel_size=2, debug_collectives=True,
        engine_timeout=60.0, **options,
    )  # fmt: skip
    report = verify(model, config, LAYERS)
    assert report.passed, [(check.id, check.evidence) for check in report.failed]
    assert not any("ranks" in check.id for check in report.checks)
    told = next(check for check in report.checks if check.id == "options/engines")
    assert "tensor_parallel_size = 2: 1 of 1 engines" in told.evidence
