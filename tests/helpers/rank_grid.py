"""Models whose dims divide by 8, in every stored format, so that the edges of blocks, groups and
words fall inside of shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from trueline.tiny.configs import FAMILIES
from trueline.utils.json_types import JSON
from trueline.verify.cases import FP4, FP8_32, FP8_UE8M0, INT4, INT4_ALL
from trueline.weights.formats import Storage
from trueline.weights.formats.base_fp8 import BaseFp8
from trueline.weights.formats.block_fp8 import BlockFp8

SIZES = (1, 2, 4, 8)
# At 8 ranks 11 columns of the dense MLP and 5 of an expert.
_DIVISIBLE: JSON = {
    "num_attention_heads": 8,
    "hidden_size": 80,
    "intermediate_size": 88,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_hidden_layers": 2,
    "vocab_size": 312,
}
_OF_FAMILY: dict[str, JSON] = {
    "bailing_moe_v2_5": {
        "group_norm_size": 8,
        "layer_group_size": 2,
        "moe_shared_expert_intermediate_size": 40,
    },
    "glm_moe_dsa": {"num_hidden_layers": 4},
    "glm4_moe_lite": {"vocab_size": 311},  # replicated
    # a layer of each form; two heads to a group
    "deepseek_v4": {
        "num_attention_heads": 16,
        "o_groups": 8,
        "head_dim": 24,
        "num_hidden_layers": 4,
    },
}
_NOT_IN_V4 = ("intermediate_size", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim")
# Groups of 32 columns: 8 of an expert's for each of 8 ranks.
_GROUPED: JSON = {"hidden_size": 96, "moe_intermediate_size": 64}
# Ling's layers have other names.
_INT4 = replace(
    INT4, ignored_modules=(*INT4.ignored_modules, r"re:.*\.attn\.", r"re:.*\.attention\.")
)


@dataclass(frozen=True)
class Stored:
    storage: Storage | None = None
    keys: JSON = field(default_factory=dict)
    fused: bool = False


STORED = {
    "plain": Stored(),
    "fused": Stored(fused=True),
    "block fp8": Stored(FP8_32),
    "block fp8, e8m0": Stored(FP8_UE8M0),
    "int4": Stored(_INT4, _GROUPED),
    # groups of 8: 5 columns of an expert cut words
    "int4 of all": Stored(
        INT4_ALL,
        {"kv_lora_rank": 40, "v_head_dim": 12, "q_lora_rank": 48, "qk_nope_head_dim": 14},
    ),
    "fp4": Stored(FP4, _GROUPED),
}


def make(tiny: Callable[..., Path], family: str, stored: str, **keys: float) -> Path:
    how = STORED[stored]
    every = {**_DIVISIBLE, **_OF_FAMILY.get(family, {}), **how.keys, **keys}
    storage = how.storage
    if family == "deepseek_v4":
        every = {key: value for key, value in every.items() if key not in _NOT_IN_V4}
        if isinstance(storage, BlockFp8):
            storage = BaseFp8(
                block=storage.block,
                power_of_two_scales=storage.power_of_two_scales,
                ignored_modules=storage.ignored_modules,
            )
    if FAMILIES[family].get("q_lora_rank", 0) is None:
        every.pop("q_lora_rank", None)
    return tiny(family, keys=every, storage=storage, fused_experts=how.fused)
