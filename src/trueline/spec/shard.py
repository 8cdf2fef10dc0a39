"""What one tensor-parallel rank holds, as a spec of its own. Layers never see the world size.

Divided: heads (and with them the state and the output norm of linear layers, the sinks and output
groups of compressed ones: a rank's heads are whole groups), the widths of dense and shared MLPs,
and routed experts: every rank has its slice of each expert's width, or (`expert_parallel`) some
experts whole. A count that does not divide is an error. Replicated: everything per token (latent
projections, norms, router, tables of expert ids, indexer, compressors, hyper-connections, cache
rows); heads where there are fewer of them than ranks: every rank then computes all of them and
nothing is exchanged; and the vocabulary where it does not divide (the result is the same, only
memory is spent).

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

MOST_RANKS = 128
"""Up to which an error looks for sizes that would do."""


class _DoesNotDivide(Exception):
    pass


def local_spec(
    spec: ModelSpec,
    rank: int,
    size: int,
    *,
    invariant_sums: bool = False,
    expert_parallel: bool = False,
) -> ModelSpec:
    """The part of `spec` that rank `rank` of `size` computes."""
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size}: ranks run from 0 to size - 1")
    try:
        return _local_spec(spec, rank, size, invariant_sums, expert_parallel)
    except _DoesNotDivide as found:
        sizes = accepted_sizes(spec, invariant_sums=invariant_sums, expert_parallel=expert_parallel)
        others = accepted_sizes(
            spec, invariant_sums=invariant_sums, expert_parallel=not expert_parallel
        )
        hint = ""
        if size in others:
            way = "by width (without" if expert_parallel else "whole (with"
            hint = f"; {size} with experts divided {way} expert parallel)"
        raise UsageError(
            f"{found} cannot be divided by tensor parallel size {size}; accepted: "
            f"{', '.join(map(str, sizes))} (all up to {MOST_RANKS} that divide everything){hint}"
        ) from None


def accepted_sizes(
    spec: ModelSpec, *, invariant_sums: bool = False, expert_parallel: bool = False
) -> list[int]:
    """The numbers of ranks that `local_spec` accepts."""

    def accepts(size: int) -> bool:
        try:
            _local_spec(spec, 0, size, invariant_sums, expert_parallel)
        except _DoesNotDivide:
            return False
        return True

    return [size for size in range(1, MOST_RANKS + 1) if accepts(size)]


def _local_spec(
    spec: ModelSpec, rank: int, size: int, invariant_sums: bool, expert_parallel: bool
) -> ModelSpec:
    def part(span: Span, what: str, *, replicable: bool = False) -> Span:
        if replicable and span.total < size:
            return span
        if span.total % size:
            raise _DoesNotDivide(f"{what} = {span.total}")
        each = span.total // size
        return Span(rank * each, (rank + 1) * each, span.total)

    def feed_forward(whole: FeedForwardSpec) -> FeedForwardSpec:
        if isinstance(whole, DenseSpec):
            return replace(whole, width=part(whole.width, "the width of the dense MLP"))
        experts, width, shared = whole.experts, whole.expert_width, whole.shared_width
        if expert_parallel:
            experts = part(experts, "the number of routed experts")
        else:
            width = part(width, "the width of a routed expert")
        return replace(
            whole,
            experts=experts,
            expert_width=width,
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
                expert_width=Span.whole(local.expert_width.total),
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
