"""What the kinds of compressed attention share: which layers there are, and how long blocks are.

All of it is kept per token, in blocks. A block of entries holds those of as many positions as any
compressor reads together, or a multiple; other blocks divide it. So wherever a prefix may end, all
windows are complete, and what a compressor still needs of the tokens before lies in whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd, lcm

from trueline.cache.kinds import KindContext
from trueline.cache.layout import GROUP
from trueline.errors import UsageError
from trueline.spec.mixer import CompressedSpec, CompressorSpec, Form
from trueline.spec.model import ModelSpec


def compressed_layers(spec: ModelSpec, *forms: Form) -> dict[int, CompressedSpec]:
    """Of these forms, or of all. Layers of one form must be alike: one store serves them."""
    found = {
        i: layer.mixer
        for i, layer in enumerate(spec.layers)
        if isinstance(layer.mixer, CompressedSpec) and (not forms or layer.mixer.form in forms)
    }
    _check_alike(spec.family, found)
    return found


def _check_alike(family: str, layers: Mapping[int, CompressedSpec]) -> None:
    shapes = {
        (m.heads, m.head_dim, m.window, m.rope.dim, m.rope.pairing, m.norm_eps)
        for m in layers.values()
    }
    of_form = {(m.form, m.compressor, m.indexer, m.rope) for m in layers.values()}
    if len(shapes) > 1 or len(of_form) > len({m.form for m in layers.values()}):
        raise UsageError(
            f"{family}: layers of compressed attention that differ in heads, window, rotation, "
            "compression or selection; accepted: one of each form"
        )


def entry_block(spec: ModelSpec, context: KindContext) -> int:
    """Positions of a block of entries. Keys in the shuffled layout stand in groups."""
    spans = [each.tail for each in _compressors(spec)]
    if context.config.index_cache_layout == "shuffled":
        chosen = compressed_layers(spec, "sparse").values()
        spans += [GROUP * each.compressor.ratio for each in chosen if each.compressor]
    together = lcm(*spans)
    return -(-context.block_size // together) * together


def window_block(spec: ModelSpec, context: KindContext) -> int:
    return gcd(context.block_size, entry_block(spec, context))


def _compressors(spec: ModelSpec) -> Iterator[CompressorSpec]:
    for mixer in compressed_layers(spec).values():
        if mixer.compressor is not None:
            yield mixer.compressor
        if mixer.indexer is not None:
            yield mixer.indexer.compressor
