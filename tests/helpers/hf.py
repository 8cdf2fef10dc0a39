"""Tiny random transformers models of the DeepSeek line: the oracle that `reference/` answers to.

The values are chosen to make a wrong fact visible: all widths differ and V != P, no norm is all
ones, the latents are small enough for their norm's eps to matter, the correction bias changes
choices, routed_scaling_factor is not 1, mscale is not mscale_all_dim, and YaRN's ramp has channels
on its slope.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from oracle import logprobs_of

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

# deepseek_v2 wants H to divide D, and its complex rotation an even L + R
D, H, Q, L, P, R, V = 48, 3, 13, 22, 10, 14, 7
VOCAB, EXPERTS, GROUPS, LAYERS = 101, 12, 4, 4
INDEX_HEADS, INDEX_DIM = 17, 19

YARN = {
    "rope_type": "yarn",
    "factor": 7.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 3.0,
    "beta_slow": 0.5,
    "mscale": 0.8,
    "mscale_all_dim": 1.3,
    "rope_theta": 300.0,
}

FLOAT64_GATE = 2e-5  # in logprob; transformers' norms and router stay float32 in its float64 model

T = 33
TOKENS = torch.randint(VOCAB, (T,), generator=torch.Generator().manual_seed(1))

ONE_BETA = {"beta_fast": 1.0, "beta_slow": 1.0}
YARNS: dict[str, dict[str, Any]] = {
    "V2": {"rope_theta": 1e4, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
    "V3": {"rope_theta": 1e4, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "K2 32": {"rope_theta": 5e4, "factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0, **ONE_BETA},
    "K2 64": {"rope_theta": 5e4, "factor": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
    "integers": {"rope_theta": 10000, "factor": 3, "mscale": 1, "mscale_all_dim": 2},
    "no mscale": {"rope_theta": 1e4, "factor": 5.5},
    "one mscale": {"rope_theta": 1e4, "factor": 5.5, "mscale": 0.7},
    "attention_factor": {"rope_theta": 1e4, "factor": 8, "attention_factor": 0.9, "mscale": 2.0},
    "not truncated": {"rope_theta": 1e4, "factor": 40, "truncate": False, "mscale_all_dim": 0.5},
    "low is high": {"rope_theta": 1e4, "factor": 4, "beta_fast": 1e-9, "beta_slow": 1e-9},
    "factor below 1": {"rope_theta": 1e4, "factor": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0},
}

CLASSES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",  # transformers has no class of its own for it
    "kimi_k25": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "deepseek_v32": "DeepseekV32",
    "glm_moe_dsa": "GlmMoeDsa",
}
SPARSE = ("deepseek_v32", "glm_moe_dsa")
# Which layers of GLM-5 see another's selection, in every spelling.
SHARING: dict[str, dict[str, Any]] = {
    "types": {"indexer_types": ["full", "shared", "shared", "full"]},
    "pattern": {"index_topk_pattern": "FSFS"},
    "freq": {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    "freq-only": {"index_topk_freq": 2},
    "none": {},
}

VISION = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "pos_emb_height": 2,
    "pos_emb_width": 2,
}


@dataclass(frozen=True)
class Case:
    family: str
    q_lora: bool = True
    yarn: bool = True
    groups: bool = True
    interleaved: bool = True
    moe: bool = True
    tied: bool = False
    topk: int = 11
    """How many keys an indexer selects, of 33."""
    sharing: str = "types"

    def __str__(self) -> str:
        names = ("q" if self.q_lora else "noq", "yarn" if self.yarn else "plain")
        rare = {"half-split": not self.interleaved, "dense": not self.moe, "tied": self.tied}
        groups = ("groups",) if self.groups else ()
        indexer = {f"top{self.topk}": self.topk != 11, self.sharing: self.sharing != "types"}
        on = (name for name, here in (rare | indexer).items() if here)
        return "-".join((self.family, *names, *groups, *on))

    @property
    def sparse(self) -> bool:
        return self.family in SPARSE


BOTH = (True, False)
# the query latent is where an indexer's queries come from
GRID = [
    case
    for values in product(CLASSES, BOTH, BOTH, BOTH)
    if (case := Case(*values)).q_lora or not case.sparse
]
CASES = [
    *GRID,
    Case("deepseek_v3", interleaved=False),
    Case("deepseek_v3", interleaved=False, yarn=False),
    *(Case(family, topk=topk) for family in SPARSE for topk in (1, 33, 50)),
    *(Case("glm_moe_dsa", yarn=False, sharing=name) for name in SHARING if name != "types"),
]

# Where the seed drawn from the name leaves some token with two experts or keys nearly on a par
# (which would fall differently in float32 and float64) or with too uniform a choice: another, found
# by trying.
SEEDS = {
    "deepseek_v2-q-yarn": 2,
    "deepseek_v2-q-plain-groups": 4,
    "deepseek_v2-noq-yarn-groups": 8,
    "deepseek_v2-noq-yarn": 2,
    "deepseek_v3-q-plain-groups": 1,
    "deepseek_v3-q-plain": 1,
    "deepseek_v3-noq-yarn-groups": 2,
    "deepseek_v3-noq-plain-groups": 1,
    "deepseek_v3-noq-plain": 1,
    "kimi_k2-q-yarn-groups": 1,
    "kimi_k2-q-plain-groups": 1,
    "kimi_k2-q-plain": 1,
    "kimi_k2-noq-yarn-groups": 2,
    "kimi_k2-noq-yarn": 2,
    "kimi_k2-noq-plain": 1,
    "kimi_k25-q-yarn": 1,
    "glm4_moe_lite-noq-yarn-groups": 1,
    "glm4_moe_lite-noq-yarn": 1,
    "glm4_moe_lite-noq-plain": 1,
    "deepseek_v3-q-yarn-groups-half-split": 1,
    "deepseek_v3-q-plain-groups-half-split": 1,
    "deepseek_v32-q-plain-groups": 2,
    "glm_moe_dsa-q-yarn": 1,
    "glm_moe_dsa-q-plain-groups": 3,
    "glm_moe_dsa-q-plain": 1,
    "glm_moe_dsa-q-plain-groups-pattern": 1,
    "glm_moe_dsa-q-plain-groups-freq": 1,
}


@dataclass(frozen=True)
class Checkpoint:
    case: Case
    path: Path
    model: Any

    def logprobs(self, tokens: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """transformers' answer [T, vocab], in `dtype` (which must hold float32 weights)."""
        return logprobs_of(self.model.to(dtype), tokens, positions)


Checkpoints = Callable[[Case], Checkpoint]


def make(case: Case, path: Path) -> Checkpoint:
    model = build(case)
    # save_pretrained would call this q_proj `self_wqkv`, by a rule meant for the vision part
    if case.family == "kimi_k25" and not case.q_lora:
        model.config.save_pretrained(path)
        save_file(model.state_dict(), path / "model.safetensors")
    else:
        model.save_pretrained(path)
    if case.family == "glm_moe_dsa" and case.sharing != "types":
        edit_config(path, indexer_types=None)  # it writes what it derived
    if case.family == "kimi_k2":
        edit_config(path, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    return Checkpoint(case, path, model)


def distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape == (T, VOCAB)
    return (ours - theirs).abs().max().item()


def edit_config(path: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    file = path / "config.json"
    raw = json.loads(file.read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None or key not in changes}
    file.write_text(json.dumps(raw))


def text_config(case: Case) -> Any:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": D,
        "intermediate_size": 37,
        "moe_intermediate_size": 19,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": H,
        "num_key_value_heads": H,
        "q_lora_rank": Q if case.q_lora else None,
        "kv_lora_rank": L,
        "qk_nope_head_dim": P,
        "qk_rope_head_dim": R,
        "v_head_dim": V,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": GROUPS if case.groups else 1,
        "topk_group": 2 if case.groups else 1,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": case.family != "deepseek_v2",
        "max_position_embeddings": 168,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": case.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    }
    if case.yarn:
        fields["rope_parameters"] = dict(YARN)
    if case.family == "deepseek_v2":
        fields["topk_method"] = "group_limited_greedy" if case.groups else "greedy"
        fields["routed_scaling_factor"] = 3.7  # softmax weights are small
    elif not case.sparse:
        fields["rope_interleave"] = case.interleaved
    if case.sparse:
        fields |= {"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM}
        fields |= {"index_topk": case.topk}
    if case.family == "glm_moe_dsa":
        fields |= SHARING[case.sharing]
    if case.family == "glm4_moe_lite":
        kinds = ["sparse", "dense", "sparse", "sparse"] if case.moe else ["dense"] * LAYERS
        fields["mlp_layer_types"] = kinds
    else:
        fields["first_k_dense_replace"] = 1 if case.moe else LAYERS
    return getattr(transformers, f"{CLASSES[case.family]}Config")(**fields)


def build(case: Case) -> Any:
    """A float32 model whose float64 twin is as exact as transformers can be.

    sdpa takes the softmax in the model's dtype, where eager attention rounds it to float32; only
    the eager experts run in float64 at all. Its norms and router stay float32 all the same.
    """
    config = text_config(case)
    kind = getattr(transformers, f"{CLASSES[case.family]}ForCausalLM")
    if case.family == "kimi_k25":
        config = transformers.Kimi_K25Config(
            text_config=config.to_dict(),
            vision_config=VISION,
            projection_hidden_size=8,
            tie_word_embeddings=case.tied,
        )
        kind = transformers.Kimi_K25ForConditionalGeneration
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    model = kind(config).float().eval()
    fill(model, case)
    return model


@torch.no_grad()
def fill(model: Any, case: Case) -> None:
    """By name, in the order of names: the values depend on the seed and nothing else."""
    generator = torch.Generator().manual_seed(SEEDS.get(str(case), crc32(str(case).encode())))
    gains = GAINS | {"gate": 1.5 if case.family == "deepseek_v2" else 2.5}  # softmax, sigmoid
    for name, tensor in sorted(model.state_dict().items()):
        noise = torch.randn(tensor.shape, generator=generator)
        module = name.split(".")[-2]
        if name.endswith("k_norm.bias"):
            tensor.copy_(0.5 * noise)
        elif "norm" in module:
            tensor.copy_(1.0 + 0.3 * noise)
        elif name.endswith("e_score_correction_bias"):
            tensor.copy_(0.3 * noise - 0.7)  # below every score: 0 is not a safe filler
        else:
            tensor.copy_(noise * gains.get(module, 1.0) * tensor.shape[-1] ** -0.5)
        if module == "kv_a_proj_with_mqa":
            tensor[:L] *= 0.03  # the latent, not the shared key


GAINS = {"embed_tokens": 2.0, "lm_head": 1.4, "q_a_proj": 0.03}
