"""What nobody reads is refused by name: a config key, a stored tensor; so is a gap, an architecture
that another reader is for, and a quantised weight that the config exempts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trueline.errors import ConfigError
from trueline.models import FAMILIES, config_file, find_family
from trueline.spec.fields import Fields, read_json
from trueline.spec.model import ModelSpec
from trueline.utils.json_types import JSON
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed
from trueline.weights.checkpoint import Checkpoint, open_checkpoint
from trueline.weights.formats.dense import DENSE, INTEGERS
from trueline.weights.formats.exempt import SPELLINGS
from trueline.weights.ledger import balance

ARCHITECTURE = {"architectures": ["BailingHybridForCausalLM"]}
SPARSE = "index_topk"


def strict(subject: Subject) -> None:
    refused(subject.model, subject.facts)


def refused(model: Path, facts: JSON) -> int:
    """Returns how many things were. The model itself is taken."""
    file = config_file(model)
    keys = _refuses_keys(file, facts)
    checkpoint = open_checkpoint(model)
    if checkpoint is None:
        raise CheckFailed(f"strict: {model} holds no weights")
    spec = _read(file, {}, facts)
    uses = balance(checkpoint, spec).uses
    used = uses[0].tensor
    turned = next(use.tensor for use in uses if _is_oblong(use.tensor.shape))
    extra = {"model.layers.0.mlp.surprise.weight": used, **checkpoint.tensors}
    gap = {name: t for name, t in checkpoint.tensors.items() if t.name != used.name}
    across = {turned.name: replace(turned, shape=turned.shape[::-1])}
    wrong = {"extra": extra, "missing": gap, "transposed": {**checkpoint.tensors, **across}}
    for what, tensors in wrong.items():
        if balance(replace(checkpoint, tensors=tensors), spec).balanced:
            raise CheckFailed(f"strict: a checkpoint with one tensor {what} was accepted")
    return keys + len(wrong) + _refuses_quantised_exempt(checkpoint, spec, file, facts)


def _is_oblong(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] != shape[1]


def _refuses_keys(file: Path, facts: JSON) -> int:
    raw = read_json(file)
    wrong: JSON = {"a_key_that_nobody_reads": 2}
    if SPARSE not in raw:
        wrong["index_topk_freq"] = 2
    if raw["model_type"] in FAMILIES:  # a package's family may be known by its architecture alone
        wrong |= ARCHITECTURE
    for key, value in wrong.items():
        try:
            _read(file, {key: value}, facts)
        except ConfigError as error:
            if key not in str(error):
                raise CheckFailed(f"strict: {key} got another error: {error}") from error
        else:
            raise CheckFailed(f"strict: {key} = {value!r} was accepted")
    return len(wrong)


def _read(file: Path, changes: JSON, facts: JSON) -> ModelSpec:
    fields = Fields(read_json(file) | changes, file)
    return find_family(fields).read(fields, facts)


def _refuses_quantised_exempt(
    checkpoint: Checkpoint, spec: ModelSpec, file: Path, facts: JSON
) -> int:
    """With a config that exempts one of the weights that are stored quantised."""
    uses = (use for use in balance(checkpoint, spec).uses if use.format not in (DENSE, INTEGERS))
    use = next(uses, None)
    section = read_json(file).get("quantization_config")
    if use is None or section is None:
        return 0
    key = next((key for key in SPELLINGS if key in section), SPELLINGS[-1])
    module = use.tensor.name.rpartition(".")[0]
    changed = _read(file, {"quantization_config": section | {key: [module]}}, facts)
    if balance(checkpoint, changed).balanced:
        raise CheckFailed(f"strict: {module} is exempt and stored as {use.format.label}: accepted")
    return 1
