"""The shared expert among the routed ones, where all are stored in one format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trueline.spec.source import Span
from trueline.weights.value import Weight


def with_shared(
    gate_up: Weight, down: Weight, shared_gate_up: Weight, shared_down: Weight
) -> tuple[Weight, Weight, int]:
    """Cut into experts as wide as the routed ones, which stand behind them: nothing is stored
    anew. And how many they are."""
    width, total = down.shape[2], shared_down.shape[1]
    count = total // width
    spans = [Span(i * width, (i + 1) * width, total) for i in range(count)]
    gates, ups = (
        [
            shared_gate_up.cut(0, Span(first + span.start, first + span.stop, 2 * total))
            for span in spans
        ]
        for first in (0, total)
    )
    both = [Weight.concat(pair) for pair in zip(gates, ups, strict=True)]
    downs = [shared_down.cut(1, span) for span in spans]
    return _behind(gate_up, both), _behind(down, downs), count


def _behind(stack: Weight, matrices: Sequence[Weight]) -> Weight:
    count = stack.shape[0]
    more = (
        replace(part, begin=(count + i, *part.begin))
        for i, matrix in enumerate(matrices)
        for part in matrix.parts
    )
    shape = (count + len(matrices), *stack.shape[1:])
    return replace(stack, shape=shape, parts=(*stack.parts, *more))
