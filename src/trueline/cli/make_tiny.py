"""`trueline make-tiny`: a small random checkpoint to test, demonstrate and port with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from trueline.errors import UsageError
from trueline.utils.progress import human_count, progress_bar


def make_tiny(
    family: str,
    directory: Path,
    /,
    *,
    config: Path | None = None,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = None,
    yarn: bool | None = None,
    layers: int | None = None,
    dense_layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    q_lora: int | None = None,
    kv_lora: int | None = None,
    nope: int | None = None,
    rope: int | None = None,
    value: int | None = None,
    linear_head: int | None = None,
    norm_groups: int | None = None,
    layer_group: int | None = None,
    index_heads: int | None = None,
    index_head: int | None = None,
    index_topk: int | None = None,
    width: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    groups: int | None = None,
    top_groups: int | None = None,
    expert_width: int | None = None,
    shared_experts: int | None = None,
    vocab: int | None = None,
    max_position: int | None = None,
    fp8_block: int = 128,
    ue8m0: Annotated[bool, Parameter(negative=())] = False,
    fused_experts: Annotated[bool, Parameter(negative=())] = False,
    shard_mb: int = 2048,
) -> None:
    """Write a random checkpoint with config, tokenizer and chat template.

    The same seed and options give the same files. Dims are unequal by default, norms are not
    ones, correction biases are not zero: a swapped fact shows.

    Parameters
    ----------
    family
        deepseek_v2, deepseek_v2_lite, deepseek_v3, kimi_k2, kimi_k25, glm4_moe_lite,
        deepseek_v32, glm_moe_dsa, bailing_moe_v2_5; or `config` with --config.
    directory
        Where to write; must not exist or be empty.
    config
        Take this config.json instead of the family's own, whatever its size.
    dtype
        Stored dtype; fp8 is block fp8 with bfloat16 for the rest. Default: the config's.
    yarn
        Put YaRN scaling in, or take it out. Default: as the family publishes.
    layers
        Number of layers; --dense-layers of them, the first, are dense.
    hidden
        Hidden size.
    q_lora
        Width of the query latent; 0 for none.
    kv_lora, nope, rope, value
        Widths of the latent, of a head's unrotated and rotated key part, of its value.
    linear_head, norm_groups, layer_group
        Of linear attention: width of a head, groups of the output norm; every
        how many layers latent attention stands in for it.
    index_heads, index_head, index_topk
        Of an indexer: its heads, width of a head, how many keys a query sees.
    width
        Width of the dense MLP.
    experts, top_k, groups, top_groups, expert_width, shared_experts
        Routed experts, how many a token takes, their groups, how many groups stay,
        one expert's width, how many shared experts.
    fp8_block
        Side of an fp8 block.
    ue8m0
        With fp8: scales are powers of two, and the config says so.
    fused_experts
        Store all experts of a layer as one tensor, as transformers holds them in memory.
    shard_mb
        Start a new file at this size.
    """
    from trueline.spec.fields import read_json
    from trueline.tiny.configs import change_config, family_config
    from trueline.tiny.make import TinyOptions, make_checkpoint
    from trueline.weights.formats.block_fp8 import BlockFp8

    if config is None:
        made = family_config(family)
    elif family != "config":
        raise UsageError(f"family '{family}' with --config: write 'config' as the family")
    else:
        made = read_json(config)
    text = made.get("text_config", made)
    stored = dtype or text.get("dtype") or text.get("torch_dtype") or "float32"
    plain = "bfloat16" if stored == "fp8" else stored
    given = {
        "num_hidden_layers": layers,
        "first_k_dense_replace": dense_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_lora_rank": kv_lora,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "head_dim": linear_head,
        "group_norm_size": norm_groups,
        "layer_group_size": layer_group,
        "index_n_heads": index_heads,
        "index_head_dim": index_head,
        "index_topk": index_topk,
        "intermediate_size": width,
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "n_group": groups,
        "topk_group": top_groups,
        "moe_intermediate_size": expert_width,
        "n_shared_experts": shared_experts,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
    }
    keys: dict[str, int | str | None] = {k: v for k, v in given.items() if v is not None}
    if q_lora is not None:
        keys["q_lora_rank"] = q_lora or None
    fp8 = BlockFp8(block=(fp8_block, fp8_block), power_of_two_scales=ue8m0, ignored_modules=())
    if stored == "fp8" and fused_experts:
        raise UsageError("--fused-experts with fp8: block fp8 experts are stored one by one")
    keys["torch_dtype"] = plain
    change_config(made, keys, yarn=yarn, fp8=fp8 if stored == "fp8" else None)
    options = TinyOptions(seed, plain, fused_experts, shard_mb * 1_000_000)
    with progress_bar("drawing weights", in_bytes=False) as progress:
        spec = make_checkpoint(directory, made, options, progress)
    count = sum(file.stat().st_size for file in directory.iterdir())
    print(
        f"{directory}: {spec.family}, {spec.num_layers} layers, stored as {stored}, "
        f"seed {seed}, {human_count(count)}B on disk"
    )
