"""Options of the engine in `trueline verify`: all that runs has them, or it says why not."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trueline.cache.kinds import index_keys, latent, lightning
from trueline.config import EngineConfig
from trueline.errors import UsageError
from trueline.verify.cases import CASES, make_subject
from trueline.verify.report import Status
from trueline.verify.suite.effects import stated
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
    *("master_addr", "master_port", "layers", "canary_report_dir", "speculative_config"),
}
"""Accepted: 1 or None; without effect on one machine; of a package; a directory."""


@pytest.mark.parametrize("name", SAMPLES)
def test_options_reach_the_engine(name: str, tmp_path: Path) -> None:
    """That which runs, and what it is seen to do."""
    model, config = made(name, tmp_path, **SAMPLES[name])
    session = Session(name, model, config)
    with session.core() as core:
        found = stated(core.plan)
        for option, value in SAMPLES[name].items():
            assert getattr(core.config, option) == value, option
            assert option not in found or found[option] == value, option
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
    todo, _ = checks(session)
    assert carry_out(todo).status == Status.PASSED, "a composition was about it"
    monkeypatch.setattr(
        Session, "engine_config", lambda self, **given: replace(plain(self, **given), block_size=4)
    )
    with session.core():
        pass
    check = carry_out(todo)
    assert check.status == Status.FAILED
    assert "block_size = 8 was given, and an engine has run with 4" in check.evidence


IGNORED: dict[str, tuple[str, dict[str, Any], Any, str, Any]] = {
    "kv_cache_group_size": (
        *("v3-near", {"kv_cache_dtype": "fp8", "kv_cache_group_size": 8}),
        *(latent, "storage", lambda made: replace(made, group=128)),
    ),
    "kv_cache_scale_fmt": (
        *("v3-near", {"kv_cache_dtype": "fp8", "kv_cache_scale_fmt": "ue8m0"}),
        *(latent, "storage", lambda made: replace(made, power_of_two=False)),
    ),
    "kv_cache_dtype": (
        *("v3-near", {"kv_cache_dtype": "e4m3fnuz"}),
        *(latent, "storage", lambda made: replace(made, storage="e4m3fn")),
    ),
    "index_cache_dtype": (
        *("v32-shallow", {"index_cache_dtype": "e4m3fn"}),
        *(index_keys, "index_layout", lambda made: replace(made, storage="float32")),
    ),
    "index_cache_layout": (
        *("v32-shallow", {"index_cache_layout": "planar"}),
        *(index_keys, "index_layout", lambda made: replace(made, kind="rows")),
    ),
    "mamba_cache_dtype": (
        *("ling-shallow", {"mamba_cache_dtype": "float16"}),
        *(lightning.LightningState, "of", lambda made: replace(made, dtype=torch.float32)),
    ),
}


@pytest.mark.parametrize("option", IGNORED)
def test_how_caches_store_is_what_was_asked_for(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers agree: the definition follows what it finds in the caches."""
    case, options, owner, function, change = IGNORED[option]
    model, config = made(case, tmp_path, **options)
    original = getattr(owner, function)
    monkeypatch.setattr(owner, function, lambda *given: change(original(*given)))
    report = verify(model, config, LAYERS)
    assert [check.id for check in report.failed] == ["options/engines", "options/plan"]
    assert report.failed[0].evidence.startswith(f"{option} = {options[option]!r} asks for ")


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
