"""Which implementation of each op and which class of each layer runs, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trueline.cache.layout import IndexLayout
from trueline.config import EngineConfig
from trueline.device import interpreting
from trueline.errors import PluginError, UsageError
from trueline.ops.registry import REGISTRY, other_device, reasons
from trueline.plugins import Registry
from trueline.spec.feedforward import DenseSpec, MoESpec
from trueline.spec.mixer import LightningSpec, MLASpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.spec.source import Spec
from trueline.weights.formats.dense import DENSE

OWN = "trueline"
"""The name of our class for a kind of layer."""
KINDS: dict[type[Spec], str] = {
    MLASpec: "mla",
    LightningSpec: "lightning",
    DenseSpec: "dense",
    MoESpec: "moe",
}
PACKING = ("linear", "mlp", "experts")
"""Ops that keep weights as layers have them: chosen for each format that these are stored in."""
# Where they are, as text: layers are built from the plan, and so stand above it.
LAYERS = Registry(
    "trueline.layers",
    "layer",
    {
        f"mla.{OWN}": "trueline.layers.mla:MLA",
        f"lightning.{OWN}": "trueline.layers.lightning:Lightning",
        f"dense.{OWN}": "trueline.layers.feedforward:Dense",
        f"moe.{OWN}": "trueline.layers.feedforward:MoE",
    },
    dict.fromkeys(KINDS.values(), ("forward",)),
)


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: str
    """With the package it comes from, if it is not ours."""


def choose_ops(
    ops: Iterable[str],
    config: EngineConfig,
    dtype: torch.dtype,
    layout: IndexLayout | None,
    device: str,
    formats: Sequence[str],
) -> tuple[dict[str, Choice], dict[str, dict[str, Choice]]]:
    """All of them, where weights are dense; and by each further stored format, those that keep
    weights."""
    stored = (DENSE.label, *formats)
    packing = {op: _choose_by_format(op, config, dtype, stored, device) for op in PACKING}
    choices = {
        op: packing[op][DENSE.label]
        if op in packing
        else choose_op(op, config, dtype, layout, device)
        for op in ops
    }
    return choices, {form: {op: packing[op][form] for op in PACKING} for form in formats}


def _choose_by_format(
    op: str, config: EngineConfig, dtype: torch.dtype, formats: Sequence[str], device: str
) -> dict[str, Choice]:
    """For an op that keeps weights: one for each stored format of the model. One that was asked
    for is taken wherever it packs the format, which must be somewhere."""
    asked = config.ops.get(op)
    others = replace(config, ops={name: config.ops[name] for name in config.ops if name != op})
    packed = [form for form in formats if asked is None or not _not_packed(op, asked, form)]
    return {
        form: choose_op(
            op,
            config if form in packed or not packed else others,
            dtype,
            device=device,
            stored=form,
        )
        for form in formats
    }


def choose_op(
    op: str,
    config: EngineConfig,
    dtype: torch.dtype,
    layout: IndexLayout | None = None,
    device: str = "cpu",
    stored: str = DENSE.label,
) -> Choice:
    """The one asked for; or the first that runs here of those that packages call preferred, then
    of ours. `stored`: the format of the weights that it packs, if it packs any."""
    if op in config.ops:
        name = config.ops[op]
        if unpacked := _not_packed(op, name, stored):
            raise UsageError(f"op {op}={name} was asked for and {unpacked[0]}")
        elsewhere = other_device(op, name, device)
        if elsewhere and not (name == "triton" and interpreting()):
            raise UsageError(f"op {op}={name} was asked for and {elsewhere[0]}, not on {device}")
        return _asked(REGISTRY, op, name, config, dtype, layout)
    refused: list[str] = []
    names = REGISTRY.names(op)
    for name in sorted(names, key=lambda name: REGISTRY.package(op, name) is None):
        package = REGISTRY.package(op, name)
        try:
            if package and not getattr(REGISTRY.get(op, name), "preferred", False):
                continue
            if not package and other_device(op, name, device):
                continue  # ours for other machines are no news
            found = (
                other_device(op, name, device)
                or _not_packed(op, name, stored)
                or _refusals(REGISTRY, op, name, config, dtype, layout)
            )
        except PluginError as error:  # nobody asked for it: told, and left out
            found = [str(error)]
        if not found:
            why = "; ".join(refused) or "preferred, and runs here"
            return Choice(name, f"{why}; from {package}" if package else why)
        refused.append(f"not {name}: {', '.join(found)}")
    raise UsageError(f"no implementation of {op} can run: {'; '.join(refused)}")


def choose_layers(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype) -> dict[str, Choice]:
    """Ours, unless another is asked for by name."""
    present = list(dict.fromkeys(kind for layer in spec.layers for kind in kinds(layer)))
    for kind, name in config.layers.items():
        LAYERS.check_name(kind, name)
        if kind not in present:
            raise UsageError(
                f"layer '{kind}': {spec.family} has none; accepted here: {', '.join(present)}"
            )
    chosen = {kind: Choice(OWN, "ours") for kind in present}
    for kind, name in config.layers.items():
        chosen[kind] = _asked(LAYERS, kind, name, config, dtype)
    return chosen


def kinds(layer: LayerSpec) -> Iterable[str]:
    return (KINDS[type(part)] for part in (layer.mixer, layer.feed_forward))


def _not_packed(op: str, name: str, stored: str) -> list[str]:
    """Why an implementation does not take weights of a format. Those that say nothing of formats
    dequantise what they are given; ours all do."""
    if REGISTRY.package(op, name) is None:
        return []
    formats: Sequence[str] | None = getattr(REGISTRY.get(op, name), "formats", None)
    if formats is None or stored in formats:
        return []
    return [f"packs {' and '.join(formats)} weights, not {stored} ones"]


def _asked(
    registry: Registry,
    kind: str,
    name: str,
    config: EngineConfig,
    dtype: torch.dtype,
    layout: IndexLayout | None = None,
) -> Choice:
    found = _refusals(registry, kind, name, config, dtype, layout)
    if found:
        reasons = "; ".join(found)
        raise UsageError(f"{registry.noun} {kind}={name} was asked for and refuses: {reasons}")
    package = registry.package(kind, name)
    return Choice(name, f"asked for; from {package}" if package else "asked for")


def _refusals(
    registry: Registry,
    kind: str,
    name: str,
    config: EngineConfig,
    dtype: torch.dtype,
    layout: IndexLayout | None,
) -> list[str]:
    found = registry.get(kind, name)
    told = reasons(found, dtype, config.batch_invariant, layout)
    probed = registry is REGISTRY and kind == "linear" and config.batch_invariant and not told
    if probed and not bits_are_steady(found, dtype):
        return ["a row's bits depend on the number of rows"]
    return told


def bits_are_steady(linear: Any, dtype: torch.dtype) -> bool:
    """Whether a row's product has the same bits alone, among any number of others and at any
    place among them, probed on shapes with and without remainders."""
    generator = torch.Generator().manual_seed(0)
    for out, inner in ((200, 128), (101, 67), (11, 37), (37, 13), (1024, 512), (48, 1030)):
        packed = linear.pack(torch.randn(out, inner, generator=generator).to(dtype))
        x = torch.randn(300, inner, generator=generator).to(dtype)
        whole = linear.run(x, packed)
        for first in (0, 5, 19):
            for count in (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 64, 100, 256):
                part = slice(first, first + count)
                if not torch.equal(linear.run(x[part], packed), whole[part]):
                    return False
    return True
