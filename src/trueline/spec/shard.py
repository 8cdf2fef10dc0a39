"""What one tensor-parallel rank holds, as a spec of its own. Layers never see the world size.

Divided: heads (and with them the state and the output norm of linear layers), routed experts, the
widths of dense and shared MLPs. A count that does not divide is an error. Replicated: everything
per token (latent projections, norms, router, indexer, cache rows), and the vocabulary where it does
not divide (the result is the same, only memory is spent).

A projection back to the hidden size sums over what is divided. Either each rank holds its own part
of every sum, and the parts are added up: that takes the least exchange, but the order of a sum then
depends on the number of ranks. Or (`invariant_sums`) each holds some hidden channels, and is given
all that is summed over: one rank computes each sum, as a single one would, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from trueline.errors import UsageError
from trueline.spec.feedforward import DenseSpec, FeedForwardSpec, MoESpec
from trueline.spec.mixer import MixerSpec
from trueline.spec.model import ModelSpec
from trueline.spec.source import Span


def local_spec(spec: ModelSpec, rank: int, size: int, *, invariant_sums: bool = False) -> ModelSpec:
    """The part of `spec` that rank `rank` of `size` computes."""
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size}: ranks run from 0 to size - 1")

    def part(span: Span, what: str) -> Span:
        if span.total % size:
            raise UsageError(
                f"{what} = {span.total} cannot be divided by tensor parallel size {size}; "
                f"accepted: a divisor of {span.total}"
            )
        each = span.total // size
        return Span(rank * each, (rank + 1) * each, span.total)

    def feed_forward(whole: FeedForwardSpec) -> FeedForwardSpec:
        if isinstance(whole, DenseSpec):
            return replace(whole, width=part(whole.width, "the width of the dense MLP"))
        shared = whole.shared_width
        return replace(
            whole,
            experts=part(whole.experts, "the number of routed experts"),
            shared_width=part(shared, "the width of the shared experts") if shared else None,
        )

    divides = spec.vocab.total % size == 0
    vocab = part(spec.vocab, "the vocabulary") if divides else spec.vocab
    outputs = part(Span.whole(spec.hidden_size), "the hidden size") if invariant_sums else None
    return _map_layers(
        replace(spec, vocab=vocab, outputs=outputs),
        {id(layer.mixer): layer.mixer.divided(part) for layer in spec.layers},
        {id(layer.feed_forward): feed_forward(layer.feed_forward) for layer in spec.layers},
    )


def whole_spec(spec: ModelSpec) -> ModelSpec:
    """Undo `local_spec`: what the checkpoint holds."""

    def feed_forward(local: FeedForwardSpec) -> FeedForwardSpec:
        if isinstance(local, MoESpec):
            shared = local.shared_width
            return replace(
                local,
                experts=Span.whole(local.experts.total),
                shared_width=Span.whole(shared.total) if shared else None,
            )
        return replace(local, width=Span.whole(local.width.total))

    return _map_layers(
        replace(spec, vocab=Span.whole(spec.vocab.total), outputs=None),
        {id(layer.mixer): layer.mixer.whole() for layer in spec.layers},
        {id(layer.feed_forward): feed_forward(layer.feed_forward) for layer in spec.layers},
    )


def _map_layers(
    spec: ModelSpec, mixers: dict[int, MixerSpec], feed_forwards: dict[int, FeedForwardSpec]
) -> ModelSpec:
    """Layers of one kind go on sharing one object."""
    return replace(
        spec,
        layers=tuple(
            replace(
                layer,
                mixer=mixers[id(layer.mixer)],
                feed_forward=feed_forwards[id(layer.feed_forward)],
            )
            for layer in spec.layers
        ),
    )
