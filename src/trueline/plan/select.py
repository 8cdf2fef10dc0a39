"""Which implementation of each op and which class of each layer runs, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch

from trueline.config import EngineConfig
from trueline.device import interpreting
from trueline.errors import PluginError, UsageError
from trueline.ops.capabilities import PUBLISHED, Capabilities, Context, undeclared
from trueline.ops.linear import LinearOp
from trueline.ops.registry import REGISTRY, capabilities, implementation
from trueline.plugins import Registry
from trueline.spec.feedforward import DenseSpec, MoESpec
from trueline.spec.mixer import CompressedSpec, LightningSpec, MLASpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.weights.formats import quantised_formats
from trueline.weights.formats.dense import DENSE

OWN = "trueline"
"""The name of our class for a kind of layer."""
OTHER = "mixer"
"""The kind of layers whose mixers another package has brought; their name is the mixer's label."""
LAYER_KINDS = tuple(
    spec.label for spec in (MLASpec, CompressedSpec, LightningSpec, DenseSpec, MoESpec)
)
PACKING = ("linear", "mlp", "experts")
"""Ops that keep weights as layers have them: chosen for each format that these are stored in."""
# Where they are, as text: layers are built from the plan, and so stand above it.
LAYERS = Registry(
    "trueline.layers",
    "layer",
    {
        f"mla.{OWN}": "trueline.layers.mla:MLA",
        f"compressed.{OWN}": "trueline.layers.compressed:Compressed",
        f"lightning.{OWN}": "trueline.layers.lightning:Lightning",
        f"dense.{OWN}": "trueline.layers.feedforward:Dense",
        f"moe.{OWN}": "trueline.layers.feedforward:MoE",
    },
    dict.fromkeys((*LAYER_KINDS, OTHER), ("forward",)),
    lambda _, found: undeclared(found),
)


class LayerClass(Protocol):
    capabilities: Capabilities

    def __call__(self, *arguments: object) -> object:
        """(spec, build, weights, name): layers/context.py has the last two's types."""


@dataclass(frozen=True, slots=True)
class Selection:
    name: str
    reason: str
    """With the package it comes from, if it is not ours."""


def choose_ops(
    ops: Iterable[str], config: EngineConfig, context: Context, formats: Mapping[str, str]
) -> tuple[dict[str, Selection], dict[str, dict[str, Selection]]]:
    """All of them, where weights are dense; and by each further weight format, those that keep
    weights. `formats`: with the numerics of each."""
    numerics = {DENSE.label: context.numerics, **formats}
    packing = {op: _choose_by_format(op, config, context, numerics) for op in PACKING}
    selections = {
        op: packing[op][DENSE.label] if op in packing else choose_op(op, config, context)
        for op in ops
    }
    return selections, {form: {op: packing[op][form] for op in PACKING} for form in formats}


def _choose_by_format(
    op: str, config: EngineConfig, context: Context, formats: Mapping[str, str]
) -> dict[str, Selection]:
    """For an op that keeps weights: one for each weight format of the model. One that was asked
    for is taken wherever it packs the format with its numerics, which must be somewhere."""
    asked = config.ops.get(op)
    others = replace(config, ops={name: config.ops[name] for name in config.ops if name != op})
    packed = [
        form
        for form, numerics in formats.items()
        if asked is None or capabilities(op, asked).packs(form, numerics)
    ]
    return {
        form: choose_op(
            op,
            config if form in packed or not packed else others,
            replace(context, numerics=numerics),
            stored=form,
        )
        for form, numerics in formats.items()
    }


# Parameters, by a part of their names, and what packs them; the first that fits.
PACKED_BY = {".experts.": "experts", ".mlp.": "mlp", "": "linear"}
"""Those of latent attention's absorbed form, which are few, are dequantised all the same."""


@dataclass(frozen=True, slots=True)
class Implementations:
    """All that was chosen."""

    ops: dict[str, Selection]
    """Of ops that keep weights: for plain float."""
    by_format: dict[str, dict[str, Selection]]
    """Weight format -> op -> what packs weights of it."""
    layers: dict[str, Selection]

    @property
    def capture(self) -> bool:
        """Whether a CUDA graph may hold a step."""
        layers = (layer_class(kind, each.name).capabilities for kind, each in self.layers.items())
        return all(each.capture for each in (*layers, *(each for _, each in self._declared())))

    def multiplies_with(self, dtype: torch.dtype) -> bool:
        """Whether all that keep weights keep them in this dtype, whatever they compute in."""
        keeping = ("batched_gemm", *PACKING)
        return all(dtype in each.weight_dtypes for op, each in self._declared() if op in keeping)

    def stays_as_stored(self, parameter: str, form: str) -> bool:
        """Whether what packs this parameter takes the format as it is."""
        op = next(op for part, op in PACKED_BY.items() if part in parameter)
        chosen = self.by_format.get(form, {}).get(op)
        return chosen is not None and capabilities(op, chosen.name).as_stored(form)

    def _declared(self) -> Iterator[tuple[str, Capabilities]]:
        for selections in (self.ops, *self.by_format.values()):
            for op, chosen in selections.items():
                yield op, capabilities(op, chosen.name)


def choose(
    spec: ModelSpec, ops: Iterable[str], config: EngineConfig, context: Context, numerics: str
) -> Implementations:
    """`numerics`: of the formats and layers that have them; all else is of `weights`."""
    formats = {
        quantised.label: numerics if numerics in quantised.numerics else context.numerics
        for quantised in quantised_formats(spec)
    }
    selections, by_format = choose_ops(ops, config, context, formats)
    layers = choose_layers(spec, config, context, numerics)
    return Implementations(selections, by_format, layers)


def choose_op(
    op: str, config: EngineConfig, context: Context, stored: str = DENSE.label
) -> Selection:
    """The one asked for; or the first that runs here of those that packages call preferred, then
    of ours. `stored`: the format of the weights that it packs, if it packs any."""
    device = context.device
    if op in config.ops:
        name = config.ops[op]
        if unpacked := capabilities(op, name).not_packed(stored):
            raise UsageError(f"op {op}={name} was asked for and {unpacked[0]}")
        elsewhere = capabilities(op, name).elsewhere(device)
        if elsewhere and not (name == "triton" and interpreting()):
            raise UsageError(f"op {op}={name} was asked for and {elsewhere[0]}, not on {device}")
        asked = _asked(REGISTRY, op, name, op_refusals(op, name, context))
        return replace(asked, reason=asked.reason + _kept(op, name, stored))
    refused: list[str] = []
    names = REGISTRY.names(op)
    for name in sorted(names, key=lambda name: REGISTRY.package(op, name) is None):
        package = REGISTRY.package(op, name)
        try:
            declared = capabilities(op, name)
            if package and not declared.preferred:
                continue
            elsewhere = declared.elsewhere(device)
            if elsewhere and not package:
                continue  # ours for other devices are not worth a line in the plan
            found = elsewhere or declared.not_packed(stored) or op_refusals(op, name, context)
        except PluginError as error:  # nobody asked for it: reported as refused
            found = [str(error)]
        if not found:
            why = "; ".join(refused) or "preferred, and runs here"
            why = f"{why}; from {package}" if package else why
            return Selection(name, why + _kept(op, name, stored))
        refused.append(f"not {name}: {', '.join(found)}")
    raise UsageError(f"no implementation of {op} can run: {'; '.join(refused)}")


def _kept(op: str, name: str, stored: str) -> str:
    as_stored = stored != DENSE.label and capabilities(op, name).as_stored(stored)
    return "; weights stay as stored" if as_stored else ""


def choose_layers(
    spec: ModelSpec, config: EngineConfig, context: Context, numerics: str
) -> dict[str, Selection]:
    """Ours, unless another is asked for by name."""
    present = list(dict.fromkeys(kind for layer in spec.layers for kind in labels(layer)))
    for kind, name in config.layers.items():
        LAYERS.check_name(kind, name)
        if kind not in present:
            raise UsageError(
                f"layer '{kind}': {spec.family} has none; accepted here: {', '.join(present)}"
            )
    chosen = {kind: _default_layer(kind, spec, context) for kind in present}
    for kind, name in config.layers.items():
        declared = layer_class(kind, name).capabilities
        rounds = kind == CompressedSpec.label and numerics == PUBLISHED
        wanted = replace(context, numerics=PUBLISHED) if rounds else context
        refused = declared.elsewhere(context.device) or declared.refusals(wanted)
        chosen[kind] = _asked(LAYERS, kind, name, refused)
    return chosen


def labels(layer: LayerSpec) -> Iterable[str]:
    return layer.mixer.label, layer.feed_forward.label


def layer_class(kind: str, name: str) -> LayerClass:
    """What the plan's choice for this kind stands for."""
    found: LayerClass = LAYERS.get(kind if kind in LAYER_KINDS else OTHER, name)
    return found


def _default_layer(kind: str, spec: ModelSpec, context: Context) -> Selection:
    """Ours; that of a package's mixer is the package's."""
    if kind in LAYER_KINDS:
        return Selection(OWN, "ours")
    package = LAYERS.package(OTHER, kind)
    if package is None:
        raise UsageError(
            f"{spec.family}: its '{kind}' mixers have no layer: accepted: one of an installed "
            f"package, as entry point '{OTHER}.{kind}' of {LAYERS.group}"
        )
    declared = layer_class(kind, kind).capabilities
    refused = declared.elsewhere(context.device) or declared.refusals(context)
    if refused:
        raise UsageError(f"layer '{kind}' of {package} refuses: {'; '.join(refused)}")
    return Selection(kind, f"from {package}")


def _asked(registry: Registry, kind: str, name: str, found: list[str]) -> Selection:
    if found:
        reasons = "; ".join(found)
        raise UsageError(f"{registry.noun} {kind}={name} was asked for and refuses: {reasons}")
    package = registry.package(kind, name)
    return Selection(name, f"asked for; from {package}" if package else "asked for")


def op_refusals(op: str, name: str, context: Context) -> list[str]:
    """With what is only known by trying."""
    declared = capabilities(op, name).refusals(context)
    if declared or op != "linear" or not context.batch_invariant:
        return declared
    linear = implementation("linear", name)
    functions = linear.pack, linear.run
    invariant = _probed(name, functions, context.dtype, torch.get_num_threads())
    return [] if invariant else ["a row's bits depend on the number of rows"]


@cache
def _probed(
    name: str, functions: tuple[Callable[..., Any], ...], dtype: torch.dtype, threads: int
) -> bool:
    """Once for all engines that a process loads: the probe takes longer than the rest of a plan.
    Another function under the same name, or another number of threads, is probed again."""
    return is_batch_invariant(implementation("linear", name), dtype)


def is_batch_invariant(linear: LinearOp, dtype: torch.dtype) -> bool:
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
