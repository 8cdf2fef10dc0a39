"""What config.json means for the indexer of DeepSeek-V3.2 and GLM-5, read a second time on purpose,
as in `config.py`."""

from dataclasses import dataclass
from typing import TypeVar

from trueline.errors import ConfigError
from trueline.reference.raw import Raw

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
KEY_NORM_EPS = 1e-6

T = TypeVar("T")

COMPUTED: dict[str, tuple[object, ...]] = {
    "rope_interleave": (True,),
    "moe_router_dtype": ("float32", "fp32"),
}


@dataclass(frozen=True)
class IndexerFacts:
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    interleaved: bool  # the first qk_rope_head_dim channels; else half-split
    shared: tuple[bool, ...]  # per layer: sees what the last full layer selected


def stated(raw: Raw, key: str, otherwise: T) -> T:
    """Null says as little as nothing."""
    value: T | None = raw.get(key)
    return otherwise if value is None else value


def read_indexer(raw: Raw) -> IndexerFacts | None:
    """None for a family that has none."""
    family = raw["model_type"]
    if family not in FAMILIES:
        return None
    for key, values in COMPUTED.items():
        if stated(raw, key, values[0]) not in values:
            raise ConfigError(f"config.json: {key}={raw[key]!r}; the reference computes {values}")
    if raw["q_lora_rank"] is None:
        raise ConfigError("config.json: q_lora_rank is null, and index queries come from there")
    glm = family == "glm_moe_dsa"
    kinds = index_kinds(raw) if glm else ["full"] * raw["num_hidden_layers"]
    if len(kinds) != raw["num_hidden_layers"] or kinds[0] != "full":
        raise ConfigError(f"config.json: index layers {kinds}; one a layer, the first one full")
    return IndexerFacts(
        index_n_heads=raw["index_n_heads"],
        index_head_dim=raw["index_head_dim"],
        index_topk=raw["index_topk"],
        interleaved=stated(raw, "indexer_rope_interleave", glm),
        shared=tuple({"full": False, "shared": True}[kind] for kind in kinds),
    )


def index_kinds(raw: Raw) -> list[str]:
    """Listed, or spelt in letters, or every so many layers; the first that is there."""
    if listed := raw.get("indexer_types"):
        return list(listed)
    if pattern := raw.get("index_topk_pattern"):
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    every = raw.get("index_topk_freq") or 1
    start = stated(raw, "index_skip_topk_offset", 2) - 1  # layers behind this one are counted
    layers = range(raw["num_hidden_layers"])
    return ["shared" if l > start and (l - start) % every else "full" for l in layers]  # noqa: E741
