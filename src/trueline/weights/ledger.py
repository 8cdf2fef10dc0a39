"""The account of a checkpoint: every stored tensor is used exactly once or unused for a stated
reason, every parameter is filled exactly once. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from trueline.errors import CheckpointError, did_you_mean
from trueline.models.parameters import parameters, published_name, unused_by_choice
from trueline.spec.model import ModelSpec, UnsupportedStorage
from trueline.spec.parameters import Parameter, Piece
from trueline.spec.shard import whole_spec
from trueline.weights.checkpoint import Checkpoint, StoredTensor
from trueline.weights.formats import PLAIN_DTYPES, Format, Storage, may_be_quantised
from trueline.weights.formats.dense import DENSE, INTEGERS

# Names by which other weight formats give themselves away, for a refusal by name.
_UNANNOUNCED = "which no quantised weight of this config has"
_GPTQ = "GPTQ or AWQ integers: cannot be loaded yet"
FOREIGN_FORMATS = {
    ".weight_packed": f"packed integers (compressed-tensors), {_UNANNOUNCED}",
    ".weight_shape": f"the shape of packed integers (compressed-tensors), {_UNANNOUNCED}",
    ".weight_scale": f"a scale, {_UNANNOUNCED}",
    ".weight_zero_point": "a zero point: only symmetric integers can be loaded",
    ".weight_g_idx": "an order of columns (actorder): only columns in order can be loaded",
    ".qweight": _GPTQ,
    ".scales": _GPTQ,
    ".scale": f"a scale of DeepSeek-V4's fp4 or fp8, {_UNANNOUNCED}",
}


@dataclass(frozen=True, slots=True)
class Use:
    """The stored tensors of one weight, which fills (part of) a parameter."""

    parameter: Parameter
    piece: Piece
    format: Format
    tensors: tuple[StoredTensor, ...]

    @property
    def tensor(self) -> StoredTensor:
        """The one that holds its numbers."""
        return self.tensors[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(slots=True)
class Ledger:
    uses: list[Use] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unused: dict[str, list[StoredTensor]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)

    @property
    def balanced(self) -> bool:
        return not (self.missing or self.unexpected or self.wrong)

    def require_balanced(self, checkpoint: Checkpoint) -> None:
        if self.balanced:
            return
        parts = [
            f"{len(items)} {what}: {_some(items)}"
            for what, items in (
                ("wrong", self.wrong),
                ("missing", self.missing),
                ("unexpected", self.unexpected),
            )
            if items
        ]
        raise CheckpointError(
            f"{checkpoint.directory}: the checkpoint does not match its config.json. "
            + "; ".join(parts)
        )


def _some(items: list[str], most: int = 4) -> str:
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest


def stored_dtypes(tensors: Iterable[StoredTensor]) -> dict[str, tuple[int, int]]:
    """dtype -> (tensors, bytes)."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += 1
        sizes[tensor.dtype] += tensor.nbytes
    return {dtype: (counts[dtype], sizes[dtype]) for dtype in sorted(counts)}


@dataclass(slots=True)
class Total:
    """Of some weights, as stored."""

    weights: int = 0
    parameters: int = 0
    nbytes: int = 0
    """Scales included."""

    def add(self, use: Use) -> None:
        self.weights += 1
        self.parameters += prod(use.piece.shape)
        self.nbytes += use.nbytes


# By the first part that a parameter's name has.
_GROUPS = {
    ".experts.": "routed experts",
    ".shared_experts.": "shared experts",
    ".mlp.gate.": "routers",
    ".mlp.": "dense MLPs",
    ".indexer.": "indexers",
    ".compressor.": "compressors",
    ".hc_": "hyper-connections",
    "norm.": "norms",
    ".self_attn.": "attention",
    "": "embedding and head",
}


def stored_formats(uses: Iterable[Use]) -> dict[str, dict[str, Total]]:
    """Format -> group of parameters -> what is stored of it."""
    totals: dict[str, dict[str, Total]] = defaultdict(dict)
    for use in uses:
        group = next(group for part, group in _GROUPS.items() if part in use.parameter.name)
        totals[use.format.label].setdefault(group, Total()).add(use)
    return {label: totals[label] for label in sorted(totals)}


def balance(checkpoint: Checkpoint, spec: ModelSpec, only: tuple[str, ...] = ("",)) -> Ledger:
    """Match what is stored with what the whole model needs, strictly both ways; or with what its
    parameters need whose names begin like one of `only`."""
    if isinstance(spec.storage, UnsupportedStorage):
        raise CheckpointError(
            f"{checkpoint.directory}: stored as {spec.storage.name}: {spec.storage.why}"
        )
    ledger = Ledger()
    found = _by_published_name(checkpoint, spec, ledger)
    taken: set[str] = set()
    for parameter in parameters(whole_spec(spec)):
        if not parameter.name.startswith(only):
            continue
        pieces = parameter.pieces
        if parameter.fused is not None and parameter.fused.source in found:
            pieces = (parameter.fused,)
        for piece in pieces:
            fmt = _format_of(spec, parameter, piece, found)
            names = fmt.names(piece.source)
            if names[0] not in found:
                ledger.missing.append(piece.source)
                continue
            there = [name for name in names if name in found]
            taken.update(there)
            use = Use(parameter, piece, fmt, tuple(found[name] for name in there))
            problem = _problem(spec, use, names)
            if problem:
                ledger.wrong.append(problem)
            else:
                ledger.uses.append(use)
    if "" in only:
        _sort_rest(ledger, spec, found, taken)
    _note_plain_weights(ledger, spec)
    return ledger


def _by_published_name(
    checkpoint: Checkpoint, spec: ModelSpec, ledger: Ledger
) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for stored, tensor in checkpoint.tensors.items():
        name = published_name(spec, stored)
        if name in found:
            ledger.wrong.append(f"{tensor} and '{found[name].name}' both mean '{name}'")
        found[name] = tensor
    return found


def _format_of(
    spec: ModelSpec, parameter: Parameter, piece: Piece, found: Mapping[str, StoredTensor]
) -> Format:
    """The checkpoint's, unless the weight is plain float or may be nothing else."""
    storage = spec.storage
    if parameter.below is not None:
        return INTEGERS
    if not isinstance(storage, Storage) or not may_be_quantised(parameter, piece):
        return DENSE
    quantised = storage.format_of(piece.source)
    numbers = found.get(quantised.names(piece.source)[0])
    return DENSE if numbers is None or numbers.dtype in PLAIN_DTYPES else quantised


def _problem(spec: ModelSpec, use: Use, names: Sequence[str]) -> str | None:
    tensor, piece = use.tensor, use.piece
    accepted = ", ".join(PLAIN_DTYPES)
    if use.format is INTEGERS:
        return INTEGERS.problem(piece.shape, use.tensors)
    if use.format is DENSE:
        problem = DENSE.problem(piece.shape, use.tensors)
        announced = spec.storage is not None or not may_be_quantised(use.parameter, piece)
        if problem and tensor.shape == piece.shape and not announced:
            return f"{problem}; config.json has no quantization_config"
        return problem
    if use.format.exempts(tensor.name) or use.format.exempts(piece.source):
        return f"{tensor}: accepted: {accepted}; quantization_config exempts it by name"
    if len(use.tensors) < len(names):
        stored = {published_name(spec, each.name) for each in use.tensors}
        missing = next(name for name in names if name not in stored)
        return f"{tensor}: its '{missing}' is missing"
    return use.format.problem(piece.shape, use.tensors)


def _sort_rest(
    ledger: Ledger, spec: ModelSpec, found: Mapping[str, StoredTensor], taken: set[str]
) -> None:
    for name in sorted(found.keys() - taken):
        tensor = found[name]
        reason = unused_by_choice(spec, name)
        if reason:
            ledger.unused[reason].append(tensor)
            continue
        foreign = next((fmt for end, fmt in FOREIGN_FORMATS.items() if name.endswith(end)), None)
        if name in ("lm_head.weight", "head.weight"):
            hint = ", while config.json says tie_word_embeddings"
        elif foreign:
            hint = f", {foreign}"
        else:  # only what an error shows; a full search over 50,000 names takes minutes
            hint = did_you_mean(name, ledger.missing[:500]) if len(ledger.unexpected) < 4 else ""
        ledger.unexpected.append(f"{tensor}{hint}")


def _note_plain_weights(ledger: Ledger, spec: ModelSpec) -> None:
    storage = spec.storage
    if not isinstance(storage, Storage):
        return
    plain = [
        use
        for use in ledger.uses
        if use.format is DENSE
        and use.parameter.kind == "matrix"
        and not storage.format_of(use.piece.source).exempts(use.tensor.name)
    ]
    if plain:
        ledger.notes.append(
            f"{len(plain)} weights are stored unquantised though quantization_config does not "
            f"exempt them (first: '{plain[0].tensor.name}'); they are taken as they are"
        )
