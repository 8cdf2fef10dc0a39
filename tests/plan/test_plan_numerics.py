"""Which numerics quantised weights are multiplied in, or DeepSeek-V4's rows rounded with, and what
the plan says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.loading import load_engine
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.ops.capabilities import Capabilities, Context
from trueline.plan import select
from trueline.plan.numerics import choose_numerics
from trueline.plan.plan import make_plan
from trueline.plan.select import choose_op
from trueline.spec.feedforward import DenseSpec
from trueline.spec.shard import local_spec
from trueline.spec.source import Span
from trueline.verify.cases import FP4, FP8_32, INT4
from trueline.weights.formats import Storage
from trueline.weights.formats.block_fp8 import BlockFp8

Tiny = Callable[..., Path]
WIDE = {"hidden_size": 160, "moe_intermediate_size": 64, "num_hidden_layers": 2}
BASE = EngineConfig(device="cpu", max_model_len=64, max_num_seqs=2)
ASKED = replace(BASE, numerics="activations")
ROUNDED = replace(BASE, numerics="published")
V4 = {"index_head_dim": 16, "num_hidden_layers": 4}
HOPPER = Context(dtype=torch.bfloat16, device="cuda", compute_capability=(9, 0))
HOPPER_FP8 = Capabilities(
    devices=("cuda",), formats=("block fp8",), numerics=("activations",), capture=True
)


@pytest.fixture
def hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not refused because kernels are interpreted."""
    monkeypatch.setattr("trueline.device.interpreting", lambda: False)


def line(config: EngineConfig, model: Path) -> str:
    plan = make_plan(read_model(model), config, find_device("cpu"))
    (found,) = (each for each in plan.lines() if each.startswith("numerics "))
    return found


@pytest.mark.parametrize(
    ("storage", "asked", "told"),
    [
        (FP8_32, "auto", "weights: the default on a CPU"),
        (FP8_32, "weights", "weights: asked for"),
        (FP8_32, "activations", "activations: asked for"),
        (INT4, "auto", "weights: int4 is weight-only (W4A16)"),
        (FP4, "auto", "weights: the default on a CPU; fp4 is weight-only (W4A16)"),
        (FP4, "activations", "activations: asked for; fp4 is weight-only (W4A16)"),
    ],
)
def test_the_plan_says_which_and_why(storage: Storage, asked: str, told: str, tiny: Tiny) -> None:
    model = tiny("deepseek_v3", keys=WIDE, storage=storage)
    assert line(EngineConfig(device="cpu", numerics=asked), model) == f"numerics     {told}"  # type: ignore[arg-type]


def test_plain_float_has_no_line(tiny: Tiny) -> None:
    plan = make_plan(read_model(tiny("deepseek_v3")), BASE, find_device("cpu"))
    assert plan.numerics.name == "weights"
    assert not any(each.startswith("numerics") for each in plan.lines())


@pytest.mark.parametrize(
    ("storage", "told"), [(None, "plain float"), (INT4, "int4")], ids=["plain", "int4"]
)
def test_activations_without_block_fp8_are_refused(
    storage: Storage | None, told: str, tiny: Tiny
) -> None:
    model = tiny("deepseek_v3", keys=WIDE, storage=storage)
    wanted = rf"numerics = 'activations': .* no weights in block fp8 \(they are {told}\); accepted"
    with pytest.raises(UsageError, match=wanted):
        load_engine(model, ASKED)


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"numerics = 'fp8': accepted: .*'weights', 'activations'"):
        EngineConfig(numerics="fp8")  # type: ignore[arg-type]


def test_only_block_fp8_sees_activations(tiny: Tiny) -> None:
    """fp4, plain float, and products that are no packed weights' have `weights`."""
    model = tiny("deepseek_v3", keys=WIDE, storage=FP4)
    plain, plan = (load_engine(model, config).plan for config in (BASE, ASKED))
    assert plan.selections == plain.selections
    assert plan.by_format["fp4"] == plain.by_format["fp4"]
    chosen = {op: each.name for op, each in plan.by_format["block fp8"].items()}
    assert chosen == {"linear": "fp8_inputs", "mlp": "cpu", "experts": "cpu"}


def test_one_that_was_asked_for_runs_where_it_can(tiny: Tiny) -> None:
    model = tiny("deepseek_v3", keys=WIDE, storage=FP8_32)
    plan = load_engine(model, replace(ASKED, ops={"linear": "torch_mm"})).plan
    assert plan.selections["linear"].name == "torch_mm"
    assert plan.by_format["block fp8"]["linear"].name == "fp8_inputs"
    with pytest.raises(UsageError, match="refuses: numerics of activations, not of weights"):
        load_engine(model, replace(BASE, ops={"linear": "fp8_inputs"}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "activations: GEMMs of fp8 are the faster ones here"),
        ({"batch_invariant": True}, "weights: the default of batch invariance"),
        (
            {"compute_capability": (8, 9)},
            "weights: the default on all GPUs but those of compute capability 9.0",
        ),
        ({"device": "cpu"}, "weights: the default on a CPU"),
    ],
)
def test_auto(changes: dict[str, object], told: str, tiny: Tiny, hopper_kernels: None) -> None:
    spec = read_model(tiny("deepseek_v3", keys=WIDE, storage=FP8_32))
    context = replace(HOPPER, **changes)  # type: ignore[arg-type]
    assert str(choose_numerics(spec, EngineConfig(), context)) == told


def test_auto_without_kernels(tiny: Tiny, hopper_kernels: None) -> None:
    """Nor with an op that was asked for and has other numerics."""
    spec = read_model(tiny("deepseek_v3", keys=WIDE, storage=FP8_32))
    config = EngineConfig(ops={"linear": "triton_quantised"})
    told = str(choose_numerics(spec, config, HOPPER))
    assert told.startswith("weights: with activations in fp8, op linear=triton_quantised was asked")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_part_is_whole_groups(rank: int, tiny: Tiny, hopper_kernels: None) -> None:
    """Both ranks decide alike: where one begins inside of a group, the other ends there."""
    divided = {"num_attention_heads": 4, "v_head_dim": 24, "intermediate_size": 256}
    spec = read_model(tiny("deepseek_v3", keys=WIDE | divided, storage=FP8_32))
    local, device = local_spec(spec, rank, 2, expert_parallel=True), find_device("cpu")
    told = (
        rf"o_proj.weight: this rank has columns {48 * rank} to {48 * rank + 48} of 96, cut inside"
    )
    with pytest.raises(UsageError, match=told):
        make_plan(local, ASKED, device)
    assert choose_numerics(local, EngineConfig(), HOPPER).name == "weights"
    invariant = local_spec(spec, rank, 2, invariant_sums=True, expert_parallel=True)
    plan = make_plan(invariant, replace(ASKED, batch_invariant=True), device)
    assert plan.numerics.name == "activations"
    whole = WIDE | divided | {"v_head_dim": 64, "n_shared_experts": 4}
    spec = read_model(tiny("deepseek_v3", keys=whole, storage=FP8_32))
    local = local_spec(spec, rank, 2, expert_parallel=True)
    assert make_plan(local, ASKED, device).numerics.name == "activations"
    told = rf"experts.0.down_proj.weight: this rank has columns {32 * rank} to {32 * rank + 32}"
    with pytest.raises(UsageError, match=told):
        make_plan(local_spec(spec, rank, 2), ASKED, device)
    wide = whole | {"moe_intermediate_size": 256}
    spec = read_model(tiny("deepseek_v3", keys=wide, storage=FP8_32))
    assert make_plan(local_spec(spec, rank, 2), ASKED, device).numerics.name == "activations"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_rank_may_end_in_a_partial_group(rank: int, tiny: Tiny) -> None:
    spec = read_model(tiny("deepseek_v3", keys=WIDE, storage=FP8_32))
    dense = spec.layers[0].feed_forward
    assert isinstance(dense, DenseSpec)
    halves = (Span(0, 128, 200), Span(128, 200, 200))
    layer = replace(spec.layers[0], feed_forward=replace(dense, width=halves[rank]))
    local = replace(spec, layers=(layer,))
    assert make_plan(local, ASKED, find_device("cpu")).numerics.name == "activations"


def test_an_mlp_of_two_numerics_is_refused(tiny: Tiny) -> None:
    storage = BlockFp8(
        block=(32, 32), power_of_two_scales=False, ignored_modules=("0.mlp.up_proj",)
    )
    model = tiny("deepseek_v3", keys=WIDE, storage=storage)
    load_engine(model, BASE).core.close()
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp: .* accepted here: numerics='wei"):
        load_engine(model, ASKED)


def test_published_is_in_the_plan(tiny: Tiny) -> None:
    """With the op that does it, which no other numerics have."""
    spec, device = read_model(tiny("deepseek_v4", keys=V4)), find_device("cpu")
    plan, plain = (make_plan(spec, each, device) for each in (ROUNDED, BASE))
    lines = list(plan.lines())
    (told,) = (each for each in lines if each.startswith("numerics "))
    assert told.startswith("numerics     published: asked for; by row_rounding, window rows and")
    assert "row_rounding composed (preferred, and runs here)" in lines
    assert plain.numerics.name == "weights"
    assert plan.selections.keys() - plain.selections.keys() == {"row_rounding"}


def test_published_multiplies_as_weights_do(tiny: Tiny) -> None:
    keys = V4 | {"hidden_size": 96, "moe_intermediate_size": 64}
    spec = read_model(tiny("deepseek_v4", keys=keys, storage=FP4))
    device = find_device("cpu")
    rounded, plain = (
        make_plan(spec, replace(BASE, numerics=each), device)  # type: ignore[arg-type]
        for each in ("published", "weights")
    )
    assert rounded.by_format == plain.by_format
    assert rounded.numerics.formats == ()


@pytest.mark.parametrize(
    ("family", "keys", "changes", "told"),
    [
        ("deepseek_v3", {}, {}, "deepseek_v3 has none; accepted here: 'auto', 'weights'$"),
        ("deepseek_v4", {"index_head_dim": 14}, {}, "index keys of 14 channels; accepted: a power"),
        ("deepseek_v4", {}, {"kv_cache_dtype": "fp8"}, "rounded again by this kv_cache_dtype"),
        (
            "deepseek_v4",
            {},
            {"kv_cache_dtype": "fp8", "kv_cache_scale_fmt": "ue8m0"},
            "accepted: 'auto'; 'e4m3fn' with .*kv_cache_group_size=64",
        ),
        (
            "deepseek_v4",
            {},
            {"kv_cache_dtype": "fp8", "kv_cache_group_size": 64},
            "with kv_cache_scale_fmt='ue8m0'",
        ),
        (
            "deepseek_v4",
            {},
            {"index_cache_dtype": "e4m3fn"},
            "index_cache_dtype='e4m3fn'; accepted: 'float32', 'bfloat16'",
        ),
    ],
)
def test_where_nothing_is_rounded_or_twice(
    family: str, keys: dict[str, int], changes: dict[str, object], told: str, tiny: Tiny
) -> None:
    spec = read_model(tiny(family, keys=(V4 if family == "deepseek_v4" else {}) | keys))
    config = replace(ROUNDED, **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=rf"numerics = 'published'.*{told}"):
        make_plan(spec, config, find_device("cpu"))


def test_what_else_v4_and_fp8_have(tiny: Tiny) -> None:
    spec = read_model(tiny("deepseek_v4", keys=V4))
    with pytest.raises(UsageError, match="accepted here: 'auto', 'weights', 'published'"):
        make_plan(spec, ASKED, find_device("cpu"))
    spec = read_model(tiny("deepseek_v3", keys=WIDE, storage=FP8_32))
    with pytest.raises(UsageError, match="accepted here: 'auto', 'weights', 'activations'"):
        make_plan(spec, ROUNDED, find_device("cpu"))


def test_layers_that_do_not_round_are_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_model(tiny("deepseek_v4", keys=V4))
    other = SimpleNamespace(capabilities=Capabilities(devices=("cpu",)))
    own = select.layer_class
    monkeypatch.setattr(
        select, "layer_class", lambda kind, name: other if name == "mine" else own(kind, name)
    )
    monkeypatch.setattr(select.LAYERS, "check_name", lambda *_: None)
    monkeypatch.setattr(select.LAYERS, "package", lambda *_: "a package")
    for kind in ("compressed", "moe"):
        config = replace(BASE, layers={kind: "mine"})
        assert make_plan(spec, config, find_device("cpu")).layers[kind].name == "mine"
    told = "layer compressed=mine was asked for and refuses: numerics of weights, not of published"
    with pytest.raises(UsageError, match=told):
        make_plan(spec, replace(ROUNDED, layers={"compressed": "mine"}), find_device("cpu"))
    plan = make_plan(spec, replace(ROUNDED, layers={"moe": "mine"}), find_device("cpu"))
    assert plan.layers["moe"].name == "mine"


def test_float16_is_refused() -> None:
    context = Context(dtype=torch.float16, device="cuda")
    with pytest.raises(UsageError, match=r"row_rounding .*float16 is not float32 or bfloat16"):
        choose_op("row_rounding", ROUNDED, context)
