"""How quantised weights are multiplied: with activations as computed (`weights`), or with what fp8
makes of them (`activations`), as the published inference of block fp8 does. `published` multiplies
as `weights` do, and rounds what DeepSeek-V4's attention and indexer read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trueline.config import EngineConfig
from trueline.device import HOPPER
from trueline.errors import UsageError
from trueline.models.parameters import parameters
from trueline.ops.capabilities import PUBLISHED, Context
from trueline.ops.row_rounding import EXACT, INDEX_GROUP, KEY_GROUP
from trueline.plan.select import PACKING, choose_op
from trueline.spec.mixer import CompressedSpec
from trueline.spec.model import ModelSpec
from trueline.weights.formats import Format, format_of, quantised_formats
from trueline.weights.formats.block_fp8 import INPUT_GROUP
from trueline.weights.formats.fp4 import Fp4
from trueline.weights.formats.pack_int4 import PackInt4

WEIGHTS, ACTIVATIONS = "weights", "activations"
PLAIN = f"'auto', '{WEIGHTS}'"
"""Numerics that every model has."""
FOUR_BITS = (PackInt4, Fp4)
KEPT_IN = tuple(str(dtype).removeprefix("torch.") for dtype in EXACT)
"""Storages of index keys that row_rounding has rounded."""
ROUNDED = (
    "by row_rounding, window rows and entries go through bfloat16 and e4m3 "
    f"({KEY_GROUP} channels a scale), index queries and keys through a Hadamard matrix and e2m1 "
    f"({INDEX_GROUP})"
)


@dataclass(frozen=True, slots=True)
class Numerics:
    name: str
    """Of the formats that have them; all others have `weights`."""
    reason: str
    formats: tuple[str, ...] = ()
    """Labels of the weight formats whose products have activations in fp8."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_numerics(spec: ModelSpec, config: EngineConfig, context: Context) -> Numerics:
    """As asked for; else `activations` where that is faster."""
    formats = quantised_formats(spec)
    able = [each for each in formats if ACTIVATIONS in each.numerics]
    only = [each for each in formats if each not in able]
    labels = tuple(each.label for each in able)
    notes = "".join(f"; {_weight_only(each)}" for each in only)
    if config.numerics == ACTIVATIONS:
        _require(spec, able, formats)
        return Numerics(ACTIVATIONS, f"asked for{notes}", labels)
    if config.numerics == PUBLISHED:
        _require_published(spec, able, context)
        return Numerics(PUBLISHED, f"asked for; {ROUNDED}; products as with 'weights'")
    if config.numerics == WEIGHTS:
        return Numerics(WEIGHTS, f"asked for{notes}")
    if not able:
        reason = "; ".join(_weight_only(each) for each in only) or "no weight is quantised"
        return Numerics(WEIGHTS, reason)
    why_not = _slower(context) or _impossible(spec, able, config, context)
    if why_not:
        return Numerics(WEIGHTS, f"{why_not}{notes}")
    return Numerics(ACTIVATIONS, f"GEMMs of fp8 are the faster ones here{notes}", labels)


def _weight_only(fmt: Format) -> str:
    return f"{fmt.label} is weight-only{' (W4A16)' if isinstance(fmt, FOUR_BITS) else ''}"


def _slower(context: Context) -> str | None:
    if context.device == "cpu":
        return "the default on a CPU"
    if context.batch_invariant:
        return "the default of batch invariance"
    if context.compute_capability != HOPPER:
        return "the default on all GPUs but those of compute capability 9.0"
    return None


def _impossible(
    spec: ModelSpec, able: Sequence[Format], config: EngineConfig, context: Context
) -> str | None:
    """Why the default where `activations` are faster is `weights` all the same, if it is."""
    for cut in _cut_groups(spec):
        return cut
    wanted = replace(context, numerics=ACTIVATIONS)
    try:
        for fmt in able:
            for op in PACKING:
                choose_op(op, config, wanted, stored=fmt.label)
    except UsageError as error:
        return f"with activations in fp8, {error}"
    return None


def _require(spec: ModelSpec, able: Sequence[Format], formats: Sequence[Format]) -> None:
    """That activations can be quantised as was asked for."""
    asked = f"numerics = '{ACTIVATIONS}'"
    others = f"{PLAIN}, '{PUBLISHED}'" if _compressed(spec) else PLAIN
    if not able:
        stored = " and ".join(each.label for each in formats) or "plain float"
        raise UsageError(
            f"{asked}: {spec.family} has no weights in block fp8 (they are {stored}); accepted "
            f"here: {others}"
        )
    for cut in _cut_groups(spec):
        raise UsageError(f"{asked}: {cut}; accepted here: {others}")


def _require_published(spec: ModelSpec, able: Sequence[Format], context: Context) -> None:
    """That there is something to round, and that what keeps it does not round again."""
    asked, mixers = f"numerics = '{PUBLISHED}'", _compressed(spec)
    others = f"{PLAIN}, '{ACTIVATIONS}'" if able else PLAIN
    if not mixers:
        raise UsageError(
            f"{asked} is what the authors' code rounds of DeepSeek-V4's compressed attention, and "
            f"{spec.family} has none; accepted here: {others}"
        )
    for mixer in mixers:
        dim = mixer.indexer.head_dim if mixer.indexer else 1
        if dim & (dim - 1):
            raise UsageError(
                f"{asked}: index keys of {dim} channels; accepted: a power of two, of which there "
                f"is a Hadamard matrix; or numerics {others}"
            )
    fp8 = context.latent.fp8 if context.latent else None
    if fp8 and (fp8.storage != "e4m3fn" or not fp8.power_of_two or KEY_GROUP % fp8.group):
        raise UsageError(
            f"{asked}: rows rounded in groups of {KEY_GROUP} would be rounded again by this "
            f"kv_cache_dtype; accepted: 'auto'; 'e4m3fn' with kv_cache_scale_fmt='ue8m0' and "
            f"kv_cache_group_size={KEY_GROUP}, which holds them as they are"
        )
    if context.index and context.index.storage not in KEPT_IN:
        raise UsageError(
            f"{asked}: index keys would be rounded again by index_cache_dtype="
            f"{context.index.storage!r}; accepted: {', '.join(map(repr, KEPT_IN))}"
        )


def _compressed(spec: ModelSpec) -> list[CompressedSpec]:
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, CompressedSpec)]


def _cut_groups(spec: ModelSpec) -> Iterator[str]:
    """Weights whose columns are divided among ranks inside of a group of channels: a rank does not
    see the others' part of it, and so not its scale."""
    for parameter in parameters(spec):
        for piece in parameter.pieces:
            fmt = format_of(spec, parameter, piece)
            if fmt is None or ACTIVATIONS not in fmt.numerics or len(piece.take) < 2:
                continue
            total = piece.shape[1]
            start, stop, _ = piece.take[1].indices(total)
            if start % INPUT_GROUP or (stop % INPUT_GROUP and stop < total):
                yield (
                    f"{piece.source}: this rank has columns {start} to {stop} of {total}, cut "
                    f"inside of a group of {INPUT_GROUP} that has one scale"
                )
