"""Compressed entries and attention over them by Triton's kernels, interpreted where there is no
GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from trueline.ops.compress import triton as compress_op
from trueline.ops.row_rounding import triton as row_rounding_op
from trueline.ops.sink_attention import triton as sink_op
from trueline.verify.ops import compress, row_rounding, sink
from trueline.verify.ops.data import randn

NARROW = torch.float16
ONE_OF_FLOATS = [pytest.param(torch.float32, marks=pytest.mark.slow), NARROW]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.mark.parametrize("dtype", ONE_OF_FLOATS)
@pytest.mark.parametrize(
    "check", [compress.compress, compress.compress_wide, compress.compress_table]
)
def test_compress(check: Callable[..., None], dtype: torch.dtype) -> None:
    check(compress_op, dtype)


@pytest.mark.parametrize("dtype", ONE_OF_FLOATS)
@pytest.mark.parametrize("check", [sink.sink_attention, sink.sink_attention_wide, sink.sink_table])
def test_sink_attention(check: Callable[..., None], dtype: torch.dtype) -> None:
    check(sink_op, dtype)


@pytest.mark.parametrize(
    "how",
    [
        sink_op.SinkLaunch(1, 16, 16, 1, 4, 1),
        sink_op.SinkLaunch(4, 16, 32, 1, 4, 1),  # tokens share keys
        sink_op.SinkLaunch(2, 8, 16, 3, 4, 1),  # and leave parts
        sink_op.SinkLaunch(1, 16, 16, 9, 4, 1),  # more splits than tiles
    ],
)
def test_any_launch(how: sink_op.SinkLaunch) -> None:
    for shape in (sink.Shape(9, 4, 8, 3), sink.Shape(5, 0, 4)):
        step = sink.sink_step(shape, [(0, 6), (8, 1), (60, 11)])
        q = randn(step.num_tokens, 11, sink.NOPE + sink.ROPE, seed=3)
        sinks = sink.head_sinks(11)
        exact, limit = sink.reference(step, q, sinks, sink.SCALE)
        prepared = sink_op.prepare(
            step.rows, step.window, step.entries, sink.FULL, size=shape.size, ratio=shape.ratio
        )
        ours = sink_op.run(
            q, step.window, step.entries, prepared,
            sinks=sinks, softmax_scale=sink.SCALE, chosen=None, how=how,
        )  # fmt: skip
        sink.within(f"{how}", ours, exact, limit[..., None])


@pytest.mark.parametrize("splits", [1, 3])
def test_an_entry_that_a_token_does_not_see_is_nan(splits: int) -> None:
    shape = sink.Shape(5, 2, topk=3)
    step = sink.sink_step(shape, [(8, 1), (9, 1)])
    chosen = torch.tensor([[0, 4, 1], [0, 4, -1]])  # the first sees four
    prepared = sink_op.prepare(
        step.rows, step.window, step.entries, sink.FULL, size=shape.size, ratio=shape.ratio
    )
    out = sink_op.run(
        randn(2, 3, sink.NOPE + sink.ROPE), step.window, step.entries, prepared,
        sinks=torch.zeros(3), softmax_scale=0.2, chosen=chosen,
        how=sink_op.SinkLaunch(1, 16, 16, splits, 4, 1),
    )  # fmt: skip
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_rounding(dtype: torch.dtype) -> None:
    row_rounding.row_rounding(row_rounding_op, dtype)


def test_row_rounding_bits() -> None:
    row_rounding.row_rounding_bits(row_rounding_op)
