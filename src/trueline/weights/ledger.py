"""The account of a checkpoint: every stored tensor is used exactly once or unused for a stated
reason, every parameter is filled exactly once. No torch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trueline.errors import CheckpointError, did_you_mean
from trueline.models.parameters import (
    Parameter,
    Piece,
    parameters,
    published_name,
    unused_by_choice,
)
from trueline.spec.model import BlockFp8, ModelSpec, UnsupportedStorage
from trueline.spec.shard import whole_spec
from trueline.weights.checkpoint import Checkpoint, StoredTensor

PLAIN_DTYPES = ("F32", "F16", "BF16")
SCALE_SUFFIX = "_scale_inv"
SCALE_DTYPES = ("F32", "F8_E8M0")

# Names by which other stored formats give themselves away, for a refusal by name.
FOREIGN_FORMATS = {
    ".weight_packed": "packed integers (compressed-tensors)",
    ".weight_scale": "a scaled format other than block fp8",
    ".qweight": "GPTQ or AWQ integers",
    ".scales": "GPTQ or AWQ integers",
    ".scale": "DeepSeek-V4's fp4 or fp8 with e8m0 scales",
}


@dataclass(frozen=True, slots=True)
class Use:
    """One stored tensor that fills (part of) a parameter, with its scales if it is block fp8."""

    parameter: Parameter
    piece: Piece
    tensor: StoredTensor
    scale: StoredTensor | None = None


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


def balance(checkpoint: Checkpoint, spec: ModelSpec) -> Ledger:
    """Match what is stored with what the whole model needs, strictly both ways."""
    if isinstance(spec.storage, UnsupportedStorage):
        raise CheckpointError(
            f"{checkpoint.directory}: stored as {spec.storage.name}: {spec.storage.why}"
        )
    ledger = Ledger()
    found = _by_published_name(checkpoint, spec, ledger)
    taken: set[str] = set()
    for parameter in parameters(whole_spec(spec)):
        pieces = parameter.pieces
        if parameter.fused is not None and parameter.fused.source in found:
            pieces = (parameter.fused,)
        for piece in pieces:
            tensor = found.get(piece.source)
            if tensor is None:
                ledger.missing.append(piece.source)
                continue
            taken.add(piece.source)
            scale_name = piece.source + SCALE_SUFFIX
            scale = found.get(scale_name) if tensor.dtype == "F8_E4M3" else None
            if scale is not None:
                taken.add(scale_name)
            problem = _problem(spec, parameter, piece, tensor, scale)
            if problem:
                ledger.wrong.append(problem)
            else:
                ledger.uses.append(Use(parameter, piece, tensor, scale))
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


def _problem(
    spec: ModelSpec,
    parameter: Parameter,
    piece: Piece,
    tensor: StoredTensor,
    scale: StoredTensor | None,
) -> str | None:
    if tensor.shape != piece.shape:
        return f"{tensor}: the config wants shape {list(piece.shape)}"
    if tensor.dtype in PLAIN_DTYPES:
        return None
    storage = spec.storage
    accepted = ", ".join(PLAIN_DTYPES)
    if tensor.dtype != "F8_E4M3" or not parameter.may_be_fp8 or piece is parameter.fused:
        return f"{tensor}: accepted here: {accepted}"
    if not isinstance(storage, BlockFp8):
        return f"{tensor}: accepted: {accepted}; config.json has no fp8 quantization_config"
    if is_ignored(storage, tensor.name) or is_ignored(storage, piece.source):
        return f"{tensor}: accepted: {accepted}; quantization_config exempts it by name"
    if scale is None:
        return f"{tensor}: its '{tensor.name}{SCALE_SUFFIX}' is missing"
    blocks = [-(-size // block) for size, block in zip(tensor.shape, storage.block, strict=True)]
    if list(scale.shape) != blocks or scale.dtype not in SCALE_DTYPES:
        return f"{scale}: accepted: {' or '.join(SCALE_DTYPES)} {blocks}"
    return None


def is_ignored(storage: BlockFp8, weight: str) -> bool:
    """Whether a weight's module, or a module around it, is exempt. By full name, never by part of
    one: 'mlp.gate' does not exempt 'mlp.gate_proj', nor 'layers.1' 'layers.11'."""
    module = weight.rpartition(".")[0]
    return any(
        bool(re.fullmatch(entry[3:], module))
        if entry.startswith("re:")
        else module == entry or module.startswith(entry + ".")
        for entry in storage.ignored_modules
    )


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
        if name == "lm_head.weight":
            hint = ", while config.json says tie_word_embeddings"
        elif foreign:
            hint = f", {foreign}: cannot be loaded yet"
        else:  # only what an error shows; a full search over 50,000 names takes minutes
            hint = did_you_mean(name, ledger.missing[:500]) if len(ledger.unexpected) < 4 else ""
        ledger.unexpected.append(f"{tensor}{hint}")


def _note_plain_weights(ledger: Ledger, spec: ModelSpec) -> None:
    if not isinstance(spec.storage, BlockFp8):
        return
    plain = [
        use
        for use in ledger.uses
        if use.scale is None
        and use.parameter.may_be_fp8
        and not is_ignored(spec.storage, use.tensor.name)
    ]
    if plain:
        ledger.notes.append(
            f"{len(plain)} weights are stored unquantised though quantization_config does not "
            f"exempt them (first: '{plain[0].tensor.name}'); they are taken as they are"
        )
