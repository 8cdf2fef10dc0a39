"""A state kind from outside, one file: examples/short_conv, installed by pip and served."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import call, install
from trueline import LLM, SamplingParams, plugins
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.errors import ConfigError, UsageError
from trueline.models import read_model
from trueline.models.statistics import cache_costs
from trueline.plan.plan import make_plan
from trueline.verify import engine as verify_engine
from trueline.verify.cases import Subject
from trueline.verify.checks import CHECKS
from trueline.verify.failed import CheckFailed

Tiny = Callable[..., Path]
# What two ranks can divide.
KEYS = {"hidden_size": 74, "intermediate_size": 90, "moe_intermediate_size": 24}
LAYERS = [0, 2]
QUICK = (
    *("engine oracle", "split = whole", "solo = batch", "prefix = cold", "preempt = resume"),
    *("poison", "overlapped = plain", "batch-invariant", "steady state"),
    *("ranks = one", "ranks = one, bitwise", "drafts = plain", "canaries"),
)
INTERPRETED = ("graph = eager", "drafts = plain, captured")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("short_conv", tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def written(site: Path, tiny: Tiny) -> Path:
    """A tiny DeepSeek-V3 whose first and third layers are convolutions."""
    model = site / "v3-conv"
    layers = map(str, LAYERS)
    source = str(tiny("deepseek_v3", keys=KEYS))
    done = call(site, "trueline_conv.write", source, str(model), *layers)
    assert done.returncode == 0, done.stderr
    return model


@pytest.fixture
def conv(site: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The written model, in a process that has the package; its reference is the package's."""
    monkeypatch.syspath_prepend(site)
    plugins.installed.cache_clear()
    reference = import_module("trueline_conv.reference").ConvReference
    monkeypatch.setattr(
        verify_engine.reference, "load", lambda model, *_, **__: reference(Path(model))
    )
    yield written
    monkeypatch.undo()
    plugins.installed.cache_clear()
    for name in [name for name in sys.modules if name.startswith("trueline_conv")]:
        del sys.modules[name]


def subject(model: Path) -> Subject:
    nothing = torch.zeros(0, dtype=torch.long)  # what checks of the reference look at
    return Subject("short_conv", model, nothing, nothing)


@pytest.mark.parametrize(
    "check", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in INTERPRETED)]
)
def test_every_check_of_the_engine(check: str, conv: Path) -> None:
    """Mixed batches, prefix hits, preemption, drafts, captured steps, ranks: with no change to the
    engine."""
    CHECKS[check](subject(conv))


def _without_snapshots(kept: Any) -> Any:
    return lambda row: list(kept(replace(row, state=row.state and _bare(row.state))))


def _bare(state: Any) -> Any:
    return type(state)(state.slot, state.source, (), state.drafts)


def _one_tap_late(build: Any) -> Any:
    def broken(self: Any, rows: Any, cells: Any) -> Any:
        made = build(self, rows, cells)
        return type(made)(made.taps.roll(1, 1), made.written_at, made.slots)

    return broken


def _never_from_zeros(source: Any) -> Any:
    return lambda row: row.state.slot if row.state.source is None else source(row)


@pytest.mark.parametrize(
    ("owner", "name", "make", "check"),
    [
        ("", "_kept", _without_snapshots, "prefix = cold"),
        ("ConvInputs", "build", _one_tap_late, "engine oracle"),
        ("", "_source", _never_from_zeros, "poison"),
    ],
)
def test_its_mistakes_are_seen(
    owner: str, name: str, make: Any, check: str, conv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("trueline_conv.kind")
    place = getattr(module, owner) if owner else module
    monkeypatch.setattr(place, name, make(getattr(place, name)))
    with pytest.raises(CheckFailed):
        CHECKS[check](subject(conv))


def test_the_plan_and_reports_show_it(conv: Path) -> None:
    spec = read_model(conv)
    config = EngineConfig(max_model_len=64, num_gpu_blocks_override=20)
    plan = make_plan(spec, config, find_device("cpu"))
    lines = list(plan.lines())
    assert "conv tails   the last 3 inputs of 74 channels" in lines
    assert "layer        short_conv: short_conv (from trueline-conv 0.1.0)" in lines
    assert plan.slots is not None
    (cost,) = (cost for cost in cache_costs(spec) if cost.kind == "short_conv")
    assert cost.layers == len(LAYERS)
    assert cost.state_bytes_per_sequence == len(LAYERS) * 3 * 74 * 4
    assert plan.slots.slot_bytes == cost.state_bytes_per_sequence


def test_it_answers_as_text(conv: Path) -> None:
    (output,) = LLM(conv, max_model_len=64).generate("true", SamplingParams(max_tokens=5))
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"conv_layers": [0, 9]}, "'conv_layers': found .*accepted: a list of layers"),
        ({"conv_taps": 1}, "'conv_taps': found 1"),
        ({"conv_tap": 3}, "conv_tap"),
    ],
)
def test_a_wrong_config_is_refused_by_key(
    keys: dict[str, object], told: str, conv: Path, tmp_path: Path
) -> None:
    config = json.loads((conv / "config.json").read_text()) | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=told):
        read_model(tmp_path)


def test_without_its_layer_the_model_is_refused(
    conv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_model(conv)
    real = plugins.installed

    def without_layers(group: str) -> Any:
        return () if group == "trueline.layers" else real(group)

    monkeypatch.setattr(plugins, "installed", without_layers)
    with pytest.raises(UsageError, match=r"'short_conv' mixers have no layer.*mixer.short_conv"):
        make_plan(spec, EngineConfig(num_gpu_blocks_override=20), find_device("cpu"))


def test_the_kind_is_one_file(site: Path) -> None:
    """What an engine must know of a new state is in kind.py; it imports of its package only the
    facts."""
    text = (site / "trueline_conv" / "kind.py").read_text()
    own = {line for line in text.splitlines() if line.startswith("from trueline_conv")}
    assert own == {"from trueline_conv.spec import ConvSpec"}
