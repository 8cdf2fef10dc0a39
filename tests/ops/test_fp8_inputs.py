"""What fp8 makes of the inputs of products: by the definition in `reference/`, number by number."""

from __future__ import annotations

import pytest
import torch

from trueline.ops.codes import codes_of
from trueline.ops.linear import fp8_inputs
from trueline.reference import functional
from trueline.spec.source import Span
from trueline.verify.ops import randn
from trueline.verify.ops.fp8_inputs import inputs, weight
from trueline.weights.formats.block_fp8 import Fp8Stored
from trueline.weights.value import Weight

each_scale = pytest.mark.parametrize("powers_of_two", [False, True], ids=["float32", "ue8m0"])


@each_scale
@pytest.mark.parametrize("channels", [1, 60, 127, 128, 129, 300, 384])
def test_rounding_is_that_of_the_reference(channels: int, powers_of_two: bool) -> None:
    """Both in float32: there the same arithmetic has the same bits."""
    for given in inputs(7, channels, torch.float32):
        ours = fp8_inputs.through_fp8(given.x, powers_of_two)
        assert torch.equal(ours, functional.through_fp8(given.x, powers_of_two))


@each_scale
def test_largest_numbers_next_to_powers_of_two(powers_of_two: bool) -> None:
    largest = torch.tensor([448.0, 1.75, 3.5, 1e-4, 448 * 2.0**-9])
    near = torch.stack((largest, largest.nextafter(2 * largest), largest.nextafter(0 * largest)))
    x = randn(15, 128) / 8 * near.flatten()[:, None]
    x[:, 77] = near.flatten()
    x[:, 20:30] = near.flatten()[:, None] * torch.logspace(-13, 0, 10, base=2.0)
    wanted = functional.through_fp8(x.double(), powers_of_two)
    ours = fp8_inputs.through_fp8(x, powers_of_two).double()
    if powers_of_two:
        assert torch.equal(ours, wanted)
    else:
        torch.testing.assert_close(ours, wanted, rtol=2**-22, atol=0.0)


@each_scale
def test_infinities_and_nan_stay_visible_in_their_group(powers_of_two: bool) -> None:
    x = torch.ones(2, 300)
    x[0, 130], x[1, 299] = torch.inf, torch.nan
    bad = fp8_inputs.through_fp8(x, powers_of_two).isnan()
    assert bad[0].tolist() == [128 <= i < 256 for i in range(300)]
    assert bad[1].tolist() == [i >= 256 for i in range(300)]


def test_no_rows() -> None:
    packed = fp8_inputs.pack(weight(40, 60, seed=1, powers_of_two=True))
    assert fp8_inputs.run(torch.empty(0, 60), packed).shape == (0, 40)


@each_scale
def test_cuts_and_codes_know_whether_scales_are_powers_of_two(powers_of_two: bool) -> None:
    matrix = weight(130, 300, seed=1, powers_of_two=powers_of_two)
    for cut in (matrix, matrix.cut(0, Span(26, 52, 130)), matrix.cut(1, Span(128, 300, 300))):
        (part,) = cut.parts
        assert isinstance(part.stored, Fp8Stored)
        assert part.stored.powers_of_two == powers_of_two
        assert codes_of(cut).powers_of_two == powers_of_two
    assert codes_of(Weight.concat((matrix, matrix))).powers_of_two == powers_of_two
