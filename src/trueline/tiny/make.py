"""Draw random weights for a config and write them as a published checkpoint.

Every tensor is drawn from its own generator, seeded by (seed, name): the same numbers whatever
else is in the model. Nothing is at a neutral value: norms are not ones, correction biases are
large enough to change choices, routers spread their choices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trueline.errors import UsageError
from trueline.models import read_model
from trueline.models.parameters import parameters
from trueline.spec.mixer import MLASpec
from trueline.spec.model import ModelSpec
from trueline.spec.parameters import Parameter
from trueline.tiny.quantise import quantise
from trueline.tiny.tokenizer import write_tokenizer
from trueline.utils.json_types import JSON
from trueline.utils.model_files import WEIGHT_INDEX
from trueline.weights.dummy import draw_parameter
from trueline.weights.formats import Storage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PREFIX = {"kimi_k25": "language_model."}
PRECISE_KINDS = (
    "correction_bias",
    "index_weights",
    "position_bias",
    "sinks",
    "hc_fn",
    "hc_base",
    "hc_scale",
    "expert_ids",
)
"""Stored in float32, or as integers, whatever the rest is."""


@dataclass(frozen=True)
class TinyOptions:
    seed: int = 0
    dtype: str = "float32"
    """Of what is plain: float32, bfloat16 or float16. Which matrices are not, quantization_config
    says."""
    fused_experts: bool = False
    max_shard_bytes: int = 2 << 30
    device: str = "cpu"
    """Where weights are drawn. Another kind of device has other numbers."""


def make_checkpoint(
    directory: Path,
    config: JSON,
    options: TinyOptions,
    progress: Callable[[int, int], None] | None = None,
    values: Callable[[str], Tensor] | None = None,
) -> ModelSpec:
    """Write config.json, weights and tokenizer into `directory`, which must be new or empty.
    `values`: float32 weights by their names in the checkpoint, instead of drawn ones."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory}: exists and is not empty; accepted: a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    text = config.get("text_config", config)
    file = directory / "config.json"
    file.write_text(json.dumps(config, indent=1) + "\n")
    try:
        spec = read_model(file)
        write_tokenizer(directory, spec.vocab.total, text.get("bos_token_id"), spec.eos_token_ids)
        with torch.device(options.device):
            drawn = _tensors(spec, options, values)
            write_shards(directory, drawn, options.max_shard_bytes, progress)
    except BaseException:
        for made in directory.iterdir():
            made.unlink()
        directory.rmdir()
        raise
    return spec


def _tensors(
    spec: ModelSpec, options: TinyOptions, values: Callable[[str], Tensor] | None
) -> Iterator[tuple[str, Tensor, int, int]]:
    """(stored name, tensor, parameters so far, parameters in all)."""
    table = list(parameters(spec))
    total = sum(parameter.count for parameter in table)
    done = 0
    prefix = PREFIX.get(spec.family, "")
    for parameter in table:
        fuse = options.fused_experts and parameter.fused is not None
        fused_values = []
        for piece in parameter.pieces:
            if values is not None:
                value = values(prefix + piece.source)
            else:
                value = draw_parameter(
                    parameter, piece.source, piece.shape, options.seed, torch.device(options.device)
                )
                _shrink_latents(value, piece.source, spec)
            done += value.numel()
            if fuse:
                fused_values.append(value)
                continue
            for name, tensor in _stored(prefix + piece.source, value, spec, options, parameter):
                yield name, tensor, done, total
        if fuse and parameter.fused is not None:
            fused = torch.empty(parameter.shape)
            for piece, value in zip(parameter.pieces, fused_values, strict=True):
                fused[piece.put] = value
            yield prefix + parameter.fused.source, fused.to(DTYPES[options.dtype]), done, total


def _stored(
    name: str, value: Tensor, spec: ModelSpec, options: TinyOptions, parameter: Parameter
) -> Iterator[tuple[str, Tensor]]:
    storage = spec.storage if parameter.kind == "matrix" else None
    fmt = storage.format_of(name) if isinstance(storage, Storage) else None
    plain = DTYPES[options.dtype]
    if parameter.kind in PRECISE_KINDS:
        yield name, value
    elif fmt is not None and not fmt.exempts(name):
        yield from zip(fmt.names(name), quantise(value, fmt, plain), strict=True)
    else:
        yield name, value.to(plain)


def _shrink_latents(value: Tensor, name: str, spec: ModelSpec) -> None:
    """Latents so small that the eps of their norms shows."""
    if name.endswith((".q_a_proj.weight", ".wq_a.weight", ".wkv.weight")):
        value *= 0.1
    elif name.endswith(".kv_a_proj_with_mqa.weight"):
        mixers = (layer.mixer for layer in spec.layers)
        latent = next(mixer for mixer in mixers if isinstance(mixer, MLASpec))
        value[: latent.kv_lora_rank] *= 0.1


def write_shards(
    directory: Path,
    tensors: Iterator[tuple[str, Tensor, int, int]],
    max_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """`tensors`: (stored name, tensor, parameters so far, parameters in all)."""
    shards: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        file = directory / f"shard-{len(shards)}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the library makes it private
        shards.append((file, list(shard)))
        shard.clear()

    size = total_size = 0
    for name, tensor, done, total in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            flush()
            size = 0
        shard[name] = tensor.contiguous().cpu()
        size += tensor.nbytes
        total_size += tensor.nbytes
        if progress:
            progress(done, total)
    flush()
    if len(shards) == 1:
        shards[0][0].rename(directory / "model.safetensors")
        return
    weight_map = {}
    for i, (file, names) in enumerate(shards, 1):
        final = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        file.rename(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / WEIGHT_INDEX).write_text(json.dumps(index, indent=1) + "\n")
