"""A weight format from outside, one file: examples/int8_format, installed by pip and served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples import call, install
from trueline import plugins
from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.errors import CheckpointError, ConfigError
from trueline.models import read_model
from trueline.spec.shard import local_spec
from trueline.verify.engine import Ask, oracle, run
from trueline.verify.ranks import serve_on_ranks
from trueline.verify.schedules import MIXED, prompt
from trueline.weights.load import StoredWeights, load_weights

Tiny = Callable[..., Path]
BASE = EngineConfig(max_model_len=400, max_num_seqs=8, num_gpu_blocks_override=400, block_size=16)
# What two ranks can divide.
KEYS = {"intermediate_size": 90, "moe_intermediate_size": 24}
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("int8_format", tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def written(site: Path, tiny: Tiny) -> Path:
    """A tiny DeepSeek-V3, written by the package's own writer."""
    model = site / "v3-int8"
    done = call(site, "trueline_int8.write", str(tiny("deepseek_v3", keys=KEYS)), str(model))
    assert done.returncode == 0, done.stderr
    return model


@pytest.fixture(scope="module")
def plain(written: Path) -> Path:
    """The same numbers in float32, which the reference reads."""
    model = written.with_name("v3-float32")
    shutil.copytree(written, model)
    stored = load_file(written / "model.safetensors")
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith("_scale")}
    assert len(scales) == sum(value.dtype == torch.int8 for value in stored.values()) > 100
    for name, scale in scales.items():
        weight = name.removesuffix("_scale")
        rows = zip(stored[weight].float(), scale, strict=True)
        stored[weight] = torch.stack([row * factor for row, factor in rows])
    save_file(stored, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture
def int8(site: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The written model, in a process that has the package."""
    monkeypatch.syspath_prepend(site)
    plugins.installed.cache_clear()
    yield written
    monkeypatch.undo()
    plugins.installed.cache_clear()


def test_it_is_read_exactly(int8: Path, plain: Path) -> None:
    spec = read_model(int8)
    ours, wanted = (load_weights(m, read_model(m), dtype=torch.float32) for m in (int8, plain))
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], value) for name, value in wanted.items())
    stored = StoredWeights(int8, local_spec(spec, 1, 2), dtype=torch.float32)
    down = stored.pop("model.layers.0.mlp.down_proj.weight")  # half of the columns, all scales
    assert (down.format, down.shape, down.nbytes) == ("int8 per row", (78, 45), 78 * (45 + 4))


def test_mixed_batches(int8: Path, plain: Path) -> None:
    oracle(plain, MIXED, run(int8, MIXED, BASE, block_size=3))
    oracle(plain, MIXED, run(int8, MIXED, BASE, max_num_batched_tokens=13, batch_invariant=True))


def test_prefix_hits(int8: Path, plain: Path) -> None:
    head, other = prompt(48, 7), prompt(48, 8)
    asks = [
        Ask([*head, 1, 2, 3], 4),
        Ask(other, 4),
        Ask([*head, 4, 5], 6, arrives=8),
        Ask([*head[:16], *other[16:], 9], 3, arrives=8),
    ]
    done = run(int8, asks, BASE)
    assert done.cached == [0, 0, 48, 16]
    oracle(plain, asks, done)


def test_preemption(int8: Path, plain: Path) -> None:
    asks = [Ask(prompt(30, i), 30) for i in range(4)]
    tight = {"num_gpu_blocks_override": 16, "block_size": 8, "max_num_batched_tokens": 64}
    done = run(int8, asks, BASE, enable_prefix_caching=False, **tight)
    assert done.core.scheduler.counters.num_preemptions > 0
    oracle(plain, asks, done)


def test_two_ranks(int8: Path, plain: Path) -> None:
    for done in serve_on_ranks(int8, MIXED, BASE, 2):
        oracle(plain, MIXED, done)


def test_the_plan_names_its_format(int8: Path) -> None:
    lines = list(load_engine(int8, replace(BASE, ops={"linear": "torch_mm"})).plan.lines())
    assert "linear       torch_mm (asked for)" in lines
    assert "linear       int8 per row: torch_mm (asked for)" in lines
    assert "numerics     weights: int8 per row is weight-only" in lines
    assert {line.split()[0] for line in lines if "int8 per row" in line} == {
        "numerics",
        "linear",
        "mlp",
        "experts",
    }


def test_inspect_counts_its_bytes(site: Path, written: Path) -> None:
    done = call(site, "trueline", "inspect", str(written), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["storage"]["kind"] == "int8 per row"
    formats, dtypes = report["checkpoint"]["formats"], report["checkpoint"]["dtypes"]
    stored = load_file(written / "model.safetensors")
    scales = [value for name, value in stored.items() if name.endswith("_scale")]
    assert formats["int8 per row"]["weights"] == dtypes["I8"]["tensors"] == len(scales)
    size = dtypes["I8"]["bytes"] + sum(value.nbytes for value in scales)
    assert formats["int8 per row"]["bytes"] == size
    assert formats["dense"]["bytes"] == report["checkpoint"]["bytes"] - size


# -- what is refused ---------------------------------------------------------------------


def changed(
    model: Path,
    target: Path,
    change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
    **keys: Any,
) -> Path:
    shutil.copytree(model, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= keys
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_without_the_package(written: Path) -> None:
    spec = read_model(written)
    with pytest.raises(CheckpointError, match="stored as example_int8: only plain float and these"):
        load_weights(written, spec, dtype=torch.float32)


def test_a_key_that_it_does_not_know(int8: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nobody reads 'quantization_config\.group_size' = 32"):
        read_model(changed(int8, tmp_path, group_size=32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP + "_scale"), f"its '{UP}_scale' is missing"),
        (lambda t: t.update({UP + "_scale": -t[UP + "_scale"]}), "positive, finite"),
        (lambda t: t.update({UP + "_scale": torch.ones(78)}), r"F32 \[90\]"),
        (lambda t: t.update({UP: t[UP].short()}), "accepted here: I8"),
        (lambda t: t.update({UP: t[UP].T.contiguous()}), r"the config wants shape \[90, 78\]"),
    ],
)
def test_damage_is_named(
    change: Callable[[dict[str, Tensor]], Any], message: str, int8: Path, tmp_path: Path
) -> None:
    model = changed(int8, tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, read_model(model), dtype=torch.float32)
