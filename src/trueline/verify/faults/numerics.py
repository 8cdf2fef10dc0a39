"""Mistakes in numerics `activations`: which inputs go through fp8, in which groups, how they are
rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trueline.layers import context, feedforward
from trueline.ops.linear import LinearOp, fp8_inputs, torch_mm
from trueline.ops.mlp import cpu as mlp
from trueline.reference import functional as reference_functional
from trueline.verify.faults import Fault, Make
from trueline.weights.formats.block_fp8 import INPUT_GROUP, BlockFp8, Fp8Stored

Split = Callable[[Tensor], Sequence[Tensor]]
Scale = Callable[[Tensor, bool], Tensor]


def _groups(x: Tensor) -> Sequence[Tensor]:
    return torch.split(x, INPUT_GROUP, dim=1)


def _halves(x: Tensor) -> Sequence[Tensor]:
    return torch.split(x, INPUT_GROUP // 2, dim=1)


def _one_late(x: Tensor) -> Sequence[Tensor]:
    return x[:, : INPUT_GROUP + 1], *_groups(x[:, INPUT_GROUP + 1 :])


def _last_joined(x: Tensor) -> Sequence[Tensor]:
    whole = max(x.shape[1] // INPUT_GROUP - 1, 0) * INPUT_GROUP
    return *_groups(x[:, :whole]), x[:, whole:]


def _scale(x: Tensor, powers_of_two: bool, largest: float = 448.0, floor: float = 1e-4) -> Tensor:
    wanted = x.abs().amax(1, keepdim=True).clamp_min(floor) / largest
    return wanted.log2().ceil().exp2() if powers_of_two else wanted


def _nearest_power(x: Tensor, powers_of_two: bool) -> Tensor:
    wanted = _scale(x, powers_of_two=False)
    return wanted.log2().round().exp2() if powers_of_two else wanted


def _nearest(quotient: Tensor) -> Tensor:
    return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).to(quotient.dtype)


def _cut_off(quotient: Tensor) -> Tensor:
    """Towards zero."""
    code = _nearest(quotient)
    mantissa, exponent = torch.frexp(code)
    below = torch.ldexp(mantissa - torch.where(code > 0, 1, -1) * 2.0**-4, exponent)
    return torch.where(code.abs() > quotient.abs(), below, code)


def _through(
    split: Split = _groups,
    scale: Scale = _scale,
    code: Callable[[Tensor], Tensor] = _nearest,
    inverted: bool = False,
) -> Make:
    def broken(x: Tensor, powers_of_two: bool) -> Tensor:
        made = []
        for part in split(x):
            if not part.shape[1]:
                continue
            scales = scale(part, powers_of_two)
            made.append(code(part / scales) * (1 / scales if inverted else scales))
        return torch.cat(made, dim=1)

    return lambda _: broken


def _plain_down(_: Make) -> Make:
    def broken(middle: Tensor, packed: mlp.Packed, linear: LinearOp) -> Tensor:
        second: object = packed.down
        if isinstance(second, fp8_inputs.Packed):
            return torch_mm.run(middle, second.weight)
        y: Tensor = linear.run(middle, packed.down)
        return y

    return broken


def _router_too(original: Make) -> Make:
    return lambda layer, x, forced: original(layer, fp8_inputs.through_fp8(x, False), forced)


def _forgets_powers(original: Make) -> Make:
    def broken(stored: Fp8Stored, axis: int, start: int, stop: int) -> Fp8Stored:
        cut: Fp8Stored = original(stored, axis, start, stop)
        return replace(cut, powers_of_two=False)

    return broken


OPS, ENGINE = "fp8 inputs, op = reference", "fp8 activations"

NUMERICS_FAULTS = [
    Fault("inputs-unquantised", "activations are multiplied as computed", ENGINE, "fp8-inputs",
          fp8_inputs, "through_fp8", lambda _: lambda x, powers_of_two: x),
    Fault("inputs-one-scale-a-token", "a token's inputs share one scale", ENGINE, "fp8-inputs",
          fp8_inputs, "through_fp8", _through(split=lambda x: [x])),
    Fault("inputs-groups-of-64", "groups of 64 channels", OPS, "fp8-inputs",
          fp8_inputs, "through_fp8", _through(split=_halves)),
    Fault("inputs-group-edge", "the first group ends one channel late", ENGINE, "fp8-inputs",
          fp8_inputs, "through_fp8", _through(split=_one_late)),
    Fault("inputs-partial-group", "what is left over shares the scale before it", ENGINE,
          "fp8-inputs", fp8_inputs, "through_fp8", _through(split=_last_joined)),
    Fault("inputs-largest-240", "scaled to the largest number of e4m3fnuz", ENGINE, "fp8-inputs",
          fp8_inputs, "through_fp8", _through(scale=lambda x, p: _scale(x, p, largest=240.0))),
    Fault("inputs-no-floor", "the smallest inputs have scales of their own", OPS, "fp8-inputs",
          fp8_inputs, "through_fp8", _through(scale=lambda x, p: _scale(x, p, floor=1e-12))),
    Fault("inputs-scale-inverted", "codes divided by their scales", ENGINE, "fp8-inputs",
          fp8_inputs, "through_fp8", _through(inverted=True)),
    Fault("inputs-cut-off", "codes towards zero, not to the nearest", ENGINE, "fp8-inputs",
          fp8_inputs, "through_fp8", _through(code=_cut_off)),
    Fault("inputs-ue8m0-nearest", "scales of inputs to the nearest power of two", ENGINE,
          "fp8-inputs-ue8m0", fp8_inputs, "through_fp8", _through(scale=_nearest_power)),
    Fault("inputs-ue8m0-ignored", "ue8m0 of weights, plain scales of inputs (vLLM#32361)", ENGINE,
          "fp8-inputs-ue8m0", BlockFp8, "powers_of_two", lambda _: property(lambda fmt: False)),
    Fault("inputs-ue8m0-always", "scales of inputs are powers of two in any checkpoint", ENGINE,
          "fp8-inputs", BlockFp8, "powers_of_two", lambda _: property(lambda fmt: True)),
    Fault("inputs-ue8m0-cut-away", "a rank's part of a weight forgets that its scales are ue8m0",
          "fp8 activations, bitwise", "fp8-inputs-ue8m0", Fp8Stored, "cut", _forgets_powers),
    Fault("inputs-of-down-plain", "the middle of an MLP is not quantised", ENGINE, "fp8-inputs",
          mlp, "down", _plain_down),
    Fault("inputs-of-router-too", "the router sees quantised inputs", ENGINE, "fp8-inputs",
          feedforward.MoE, "_route", _router_too),
    Fault("inputs-of-mixed-plain", "beside a plain weight, block fp8 counts as plain", ENGINE,
          "fp8-inputs-exempt", context.Build, "mixes_numerics", lambda _: lambda *given: False),
    Fault("reference-inputs-groups", "the reference's own groups of 64 channels", ENGINE,
          "fp8-inputs", reference_functional, "GROUP", lambda _: INPUT_GROUP // 2),
]  # fmt: skip
