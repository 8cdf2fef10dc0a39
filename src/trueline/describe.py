"""Everything `inspect` says about a model, as plain JSON-able data. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from trueline.cache.layout import LATENT_GROUP, LatentFp8, LatentLayout
from trueline.errors import CheckpointError
from trueline.models import config_file, read_model
from trueline.models.statistics import cache_costs, count_parameters
from trueline.spec.mixer import MLASpec
from trueline.spec.model import DTYPE_BYTES, LayerSpec, ModelSpec, WeightStorage
from trueline.spec.source import Source, Span, Spec
from trueline.text.encodings import find_encoding
from trueline.text.files import read_files, read_object
from trueline.utils.json_types import JSON
from trueline.weights.checkpoint import Checkpoint, open_checkpoint
from trueline.weights.ledger import Total, balance, stored_dtypes, stored_formats

KIND_NAMES = {
    "MLASpec": "latent attention (MLA)",
    "IndexerSpec": "selection of keys (indexer)",
    "CompressedSpec": "compressed attention",
    "CompressorSpec": "compression of tokens into entries",
    "EntryIndexerSpec": "selection of entries (indexer)",
    "HyperConnectionsSpec": "hyper-connections",
    "LightningSpec": "linear attention (lightning)",
    "DenseSpec": "dense MLP",
    "MoESpec": "mixture of experts",
    "RopeSpec": "rotary embedding",
    "YarnSpec": "YaRN scaling",
    "RouterSpec": "expert choice",
}


def describe(model: str | Path, facts: Mapping[str, object] | None = None) -> JSON:
    spec = read_model(model, facts)
    file = config_file(model)
    directory = file.parent if Path(model).is_dir() else None
    counts = count_parameters(spec)
    return {
        "model": str(model),
        "config": str(file),
        "family": spec.family,
        "runnable": spec.not_runnable is None,
        "not_runnable": spec.not_runnable,
        "refused_inputs": list(spec.refused_inputs),
        "facts": _facts(spec),
        "hyper_connections": spec.hyper_connections and _node(spec.hyper_connections),
        "layer_kinds": layer_kinds(spec),
        "storage": _node(spec.storage) if spec.storage else {"kind": "plain float", "facts": []},
        "parameters": {"total": counts.total, "active": counts.active},
        "cache": [
            {
                "kind": cost.kind,
                "layers": cost.layers,
                "bytes_per_token": cost.bytes_per_token,
                "state_bytes_per_sequence": cost.state_bytes_per_sequence,
                "fields": dict(cost.fields),
            }
            for cost in cache_costs(spec)
        ],
        "fp8_latents": _fp8_latents(spec),
        "chat": _chat(file, directory),
        "checkpoint": _checkpoint(directory, spec),
    }


def _fp8_latents(spec: ModelSpec) -> JSON | None:
    """What latents and rotated keys of a token take, over all layers, with kv_cache_dtype='fp8'."""
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, MLASpec)]
    if not mixers:
        return None
    fp8 = LatentFp8("e4m3fn", spec.dtype, LATENT_GROUP)
    rows = (LatentLayout(m.kv_lora_rank, m.qk_rope_head_dim, 1, fp8) for m in mixers)
    taken = sum(row.row_bytes(DTYPE_BYTES[spec.dtype]) for row in rows)
    return {"storage": fp8.storage, "group_size": fp8.group, "bytes_per_token": taken}


def _chat(config: Path, directory: Path | None) -> JSON | None:
    """How prompts are made of chats, where the family has an encoding and the model no template."""
    found = find_encoding(read_object(config), directory)
    if found is None or (directory and "default" in read_files(directory).templates):
        return None
    facts = [_fact(name, fact.value, fact.source) for name, fact in found.facts.items()]
    return {"kind": f"encoding of {found.title}", "facts": facts}


def layer_kinds(spec: ModelSpec) -> list[JSON]:
    """Layers with equal facts, but for their place, are one kind; in order of appearance."""
    kinds: list[tuple[LayerSpec, list[int]]] = []
    for layer in spec.layers:
        for first, members in kinds:
            if _same_kind(first, layer):
                members.append(layer.index)
                break
        else:
            kinds.append((layer, [layer.index]))
    return [
        {
            "layers": members,
            "mixer": _node(first.mixer),
            "mixer_source": _source(first, "mixer"),
            "feed_forward": _node(first.feed_forward),
            "feed_forward_source": _source(first, "feed_forward"),
        }
        for first, members in kinds
    ]


def _same_kind(a: LayerSpec, b: LayerSpec) -> bool:
    return a.mixer.same_kind(b.mixer) and a.feed_forward == b.feed_forward


def _source(layer: LayerSpec, part: str) -> str | None:
    source = layer.sources.get(part)
    return source.text if source else None


def _node(spec: Spec) -> JSON:
    """A spec's own facts, and the specs inside it under their field names."""
    inner = {
        item.name: _node(value)
        for item in fields(spec)
        if isinstance(value := getattr(spec, item.name), Spec)
    }
    name = type(spec).__name__
    kind = spec.label if isinstance(spec, WeightStorage) else KIND_NAMES.get(name, name)
    return {"kind": kind, "facts": _facts(spec), **inner}


def _facts(spec: Spec) -> list[JSON]:
    return [_fact(*fact) for fact in spec.facts()]


def _fact(name: str, value: object, source: Source) -> JSON:
    return {"name": name, "value": _plain(value), "from": source.kind, "source": source.text}


def _plain(value: object) -> object:
    if isinstance(value, Span):
        return value.total if value.is_whole else str(value)
    return list(value) if isinstance(value, tuple) else value


def _checkpoint(directory: Path | None, spec: ModelSpec) -> JSON | None:
    checkpoint = open_checkpoint(directory) if directory else None
    if checkpoint is None:
        return None
    stored = checkpoint.tensors.values()
    summary: JSON = {
        "files": [file.name for file in checkpoint.files],
        "tensors": len(stored),
        "bytes": sum(tensor.nbytes for tensor in stored),
        "dtypes": {
            dtype: {"tensors": count, "bytes": size}
            for dtype, (count, size) in stored_dtypes(stored).items()
        },
    }
    return summary | _ledger(checkpoint, spec)


def _ledger(checkpoint: Checkpoint, spec: ModelSpec) -> JSON:
    try:
        ledger = balance(checkpoint, spec)
    except CheckpointError as error:
        return {"refused": str(error)}
    return {
        "used": sum(len(use.tensors) for use in ledger.uses),
        "formats": {
            label: {
                **_total(groups.values()),
                "groups": {group: _total([total]) for group, total in groups.items()},
            }
            for label, groups in stored_formats(ledger.uses).items()
        },
        "missing": ledger.missing,
        "unexpected": ledger.unexpected,
        "wrong": ledger.wrong,
        "unused_by_choice": {
            reason: {"tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors)}
            for reason, tensors in ledger.unused.items()
        },
        "notes": ledger.notes,
        "balanced": ledger.balanced,
    }


def _total(totals: Collection[Total]) -> JSON:
    """With the effective bits of one parameter: scales included."""
    parameters = sum(total.parameters for total in totals)
    size = sum(total.nbytes for total in totals)
    return {
        "weights": sum(total.weights for total in totals),
        "parameters": parameters,
        "bytes": size,
        "bits": round(8 * size / parameters, 3),
    }


def layer_ranges(layers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
