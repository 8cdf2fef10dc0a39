"""Which kernels run attention on a GPU, and why not others, is printed with the plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paths import CONFIGS
from trueline import device
from trueline.config import EngineConfig
from trueline.device import Device
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.ops.capabilities import Capabilities, Context
from trueline.plan import select
from trueline.plan.plan import _op_context, make_plan
from trueline.plan.select import Implementations, Selection

HOPPER, AMPERE = (9, 0), (8, 0)
ALL = ("mla_decode", "mla_prefill", "sparse_mla")


def gpu_of(compute_capability: tuple[int, int]) -> Device:
    return Device(
        kind="cuda",
        name="some",
        threads=1,
        free_memory=140 << 30,
        total_memory=140 << 30,
        compute_capability=compute_capability,
    )


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
    config = EngineConfig(device="cuda")
    plan = make_plan(read_model(CONFIGS / name), config, gpu_of(capability))
    lines = list(plan.lines())
    for op, line in told.items():
        assert f"{op:<12} {line}" in lines
    assert plan.graphs


def test_implementations_hear_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several kinds, each adds what it knows and takes nothing away."""
    monkeypatch.setattr(device, "interpreting", lambda: False)
    config = EngineConfig(device="cuda", batch_invariant=False)
    kinds = make_plan(read_model(CONFIGS / "v32s"), config, gpu_of(HOPPER)).kinds
    for order in (kinds, kinds[::-1]):
        context = _op_context(config, gpu_of(HOPPER), torch.bfloat16, order)
        assert None not in (context.heads, context.latent, context.index)
        assert (context.device, context.compute_capability) == ("cuda", HOPPER)


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("v2lite", ("topk", "sparse_mla", "index_scores", "lightning", "gated_norm")),
        ("ling25s", ("topk", "sparse_mla", "index_scores")),
        ("v32s", ("lightning", "gated_norm")),
    ],
)
def test_only_ops_that_the_model_has_layers_for_are_chosen(
    name: str, absent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no implementation of another kind's ops could run, a model without it still loads."""
    monkeypatch.setattr(device, "interpreting", lambda: False)
    config = EngineConfig(device="cuda")
    plan = make_plan(read_model(CONFIGS / name), config, gpu_of(HOPPER))
    assert not set(absent) & set(plan.selections)
    assert {op for kind in plan.kinds for op in kind.ops} <= set(plan.selections)


# -- whether decode steps are captured ---------------------------------------------------


PLAIN, REFUSES = Selection("plain", ""), Selection("refuses", "")
PLACES = ("ops", "by_format", "layers")


def chosen(refusing: str) -> Implementations:
    """A choice of each sort; the one of this sort forbids capture."""
    each = {place: REFUSES if place == refusing else PLAIN for place in PLACES}
    return Implementations(
        {"rope": each["ops"]}, {"fp8": {"linear": each["by_format"]}}, {"mla": each["layers"]}
    )


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    def capabilities(_: str, name: str) -> Capabilities:
        return Capabilities(devices=("cuda",), capture=name == "plain")

    monkeypatch.setattr(select, "capabilities", capabilities)
    monkeypatch.setattr(
        select, "layer_class", lambda *of: SimpleNamespace(capabilities=capabilities(*of))
    )


@pytest.mark.usefixtures("declared")
def test_whatever_runs_may_forbid_capture() -> None:
    """An op, one chosen for a weight format only, a layer."""
    assert chosen("none").capture
    assert [place for place in PLACES if chosen(place).capture] == []


@pytest.mark.parametrize(("eager", "capture"), [(False, True), (True, True), (False, False)])
def test_steps_are_captured_unless_something_forbids_it(
    eager: bool, capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "interpreting", lambda: False)
    monkeypatch.setattr(Implementations, "capture", capture)
    config = EngineConfig(device="cuda", enforce_eager=eager)
    plan = make_plan(read_model(CONFIGS / "v2lite"), config, gpu_of(HOPPER))
    assert plan.graphs == (capture and not eager)


# -- layers of packages ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "batch_invariant", "told"),
    [("cuda", False, "refuses: runs on cpu"), ("cpu", True, "refuses: not batch-invariant")],
)
@pytest.mark.parametrize("asked", [True, False])
def test_layers_that_do_not_run_here_are_refused(
    asked: bool, device: str, batch_invariant: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was asked for by name, and that of a package's own mixer."""
    spec = read_model(CONFIGS / "v2lite")
    context = Context(dtype=torch.float32, device=device, batch_invariant=batch_invariant)
    here = Context(dtype=torch.float32, device="cpu", batch_invariant=False)
    mine = SimpleNamespace(capabilities=Capabilities(devices=("cpu",)))
    monkeypatch.setattr(select, "layer_class", lambda *_: mine)
    monkeypatch.setattr(select.LAYERS, "check_name", lambda *_: None)
    monkeypatch.setattr(select.LAYERS, "package", lambda *_: "a package")

    def choose(context: Context) -> Selection:
        if asked:
            config = EngineConfig(layers={"mla": "mine"})
            layers = select.choose_layers(spec, config, context, "weights")
            return layers["mla"]
        return select._default_layer("mine", spec, context)

    assert choose(here).name == "mine"
    with pytest.raises(UsageError, match=told):
        choose(context)
