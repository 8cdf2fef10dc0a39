"""`trueline make-tiny`: a small random checkpoint to test, demonstrate and port with."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.errors import UsageError
from trueline.utils.progress import human_count, progress_bar

if TYPE_CHECKING:
    from trueline.utils.json_types import JSON

Dtype = Literal["float32", "bfloat16", "float16"]
Format = Literal["block-fp8", "base-fp8", "int4", "fp4"]
# As published.
SIDE, GROUP = 128, 32


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TinyDims:
    """Dims of the model. What is not given is the config's."""

    layers: int | None = None
    """Number of layers; --dense-layers of them, the first, are dense."""
    dense_layers: int | None = None
    hidden: int | None = None
    """Hidden size."""
    heads: int | None = None
    """Attention heads."""
    q_lora: int | None = None
    """Width of the query latent; 0 for none."""
    kv_lora: int | None = None
    """Width of the latent."""
    nope: int | None = None
    """Width of a head's unrotated key part."""
    rope: int | None = None
    """Width of a head's rotated key part."""
    value: int | None = None
    """Width of a head's value."""
    linear_head: int | None = None
    """Of linear or compressed attention: width of a head."""
    norm_groups: int | None = None
    """Of linear attention: groups of the output norm."""
    layer_group: int | None = None
    """Of linear attention: every how many layers latent attention stands in for it."""
    index_heads: int | None = None
    """Of an indexer: its heads."""
    index_head: int | None = None
    """Of an indexer: width of a head."""
    index_topk: int | None = None
    """Of an indexer: how many keys a query sees."""
    window: int | None = None
    """Of compressed attention: positions that a query sees as they are."""
    output_groups: int | None = None
    """Of compressed attention: groups of heads that share an output projection."""
    output_lora: int | None = None
    """Of compressed attention: width of a group's output."""
    hash_layers: int | None = None
    """How many layers, the first, take a token's experts from a table."""
    width: int | None = None
    """Width of the dense MLP."""
    experts: int | None = None
    """Routed experts."""
    top_k: int | None = None
    """How many experts a token takes."""
    groups: int | None = None
    """Groups of experts."""
    top_groups: int | None = None
    """How many groups stay for a token."""
    expert_width: int | None = None
    """One expert's width."""
    shared_experts: int | None = None
    """How many shared experts."""
    vocab: int | None = None
    """Size of the vocabulary."""
    max_position: int | None = None
    """Positions that the model is made for."""

    def config_keys(self) -> dict[str, int | str | None]:
        """What is given, under config.json's names."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        keys = {KEYS[name]: value for name, value in given.items() if value is not None}
        return keys if self.q_lora != 0 else keys | {KEYS["q_lora"]: None}


KEYS = {
    "layers": "num_hidden_layers",
    "dense_layers": "first_k_dense_replace",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "q_lora": "q_lora_rank",
    "kv_lora": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
    "linear_head": "head_dim",
    "norm_groups": "group_norm_size",
    "layer_group": "layer_group_size",
    "index_heads": "index_n_heads",
    "index_head": "index_head_dim",
    "index_topk": "index_topk",
    "window": "sliding_window",
    "output_groups": "o_groups",
    "output_lora": "o_lora_rank",
    "hash_layers": "num_hash_layers",
    "width": "intermediate_size",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "groups": "n_group",
    "top_groups": "topk_group",
    "expert_width": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "vocab": "vocab_size",
    "max_position": "max_position_embeddings",
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TinyStorage:
    """How the weights are stored."""

    format: Format | None = None
    """Of matrices: block-fp8, as DeepSeek-V3 is published; int4 packs of the routed experts, as
    Kimi-K2.5; fp4 routed experts beside block fp8, as DeepSeek-V4; base-fp8, as its Base variants.
    Default: the config's, or plain."""
    fp8_block: int = SIDE
    """With block-fp8, base-fp8 or fp4: side of an fp8 block."""
    ue8m0: Annotated[bool, Parameter(negative=())] = False
    """With block-fp8 or base-fp8: scales are powers of two, and the config says so."""
    group_size: int = GROUP
    """With int4: columns of one scale."""
    fused_experts: Annotated[bool, Parameter(negative=())] = False
    """Store all experts of a layer as one tensor, as transformers holds them in memory."""
    shard_mb: int = 2048
    """Start a new file at this size."""


def make_tiny(
    family: str,
    directory: Path,
    /,
    *,
    config: Path | None = None,
    seed: int = 0,
    dtype: Dtype | None = None,
    yarn: bool | None = None,
    compress_rates: tuple[int, int] | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    dims: TinyDims = TinyDims(),  # noqa: B008
    storage: TinyStorage = TinyStorage(),  # noqa: B008
) -> None:
    """Write a random checkpoint with config, tokenizer and chat template.

    The same seed and options give the same files. Dims are unequal by default, norms are not
    ones, correction biases are not zero: a swapped fact shows.

    Parameters
    ----------
    family
        deepseek_v2, deepseek_v2_lite, deepseek_v3, kimi_k2, kimi_k25, glm4_moe_lite,
        deepseek_v32, glm_moe_dsa, bailing_moe_v2_5, deepseek_v4; or `config` with --config.
    directory
        Where to write; must not exist or be empty.
    config
        Take this config.json instead of the family's own, whatever its size: a file, or the
        directory that it is in.
    dtype
        Stored dtype of what is plain. Default: the config's.
    yarn
        Put YaRN scaling in, or take it out. Default: as the family publishes.
    compress_rates
        Of deepseek_v4: tokens of a selected entry and of one that all queries see, instead of 4 and
        128. The config is then written as transformers saves it.
    device
        Where weights are drawn: cuda is quicker for a large model, and has other numbers.
    """
    from trueline.device import find_device
    from trueline.tiny.configs import as_saved, change_config
    from trueline.tiny.make import TinyOptions, make_checkpoint
    from trueline.tiny.quantise import published_storage

    made = _base_config(family, config)
    _check_options(storage)
    text = made.get("text_config", made)
    plain = dtype or text.get("dtype") or text.get("torch_dtype") or "float32"
    stored = None
    if storage.format is not None:
        stored = published_storage(
            storage.format, storage.fp8_block, storage.ue8m0, storage.group_size
        )
    if stored is not None and storage.fused_experts:
        raise UsageError("--fused-experts with --format: quantised experts are stored one by one")
    _check_dims(dims, text)
    keys = (_whole_groups(storage) if config is None else {}) | dims.config_keys()
    change_config(made, keys | {"torch_dtype": plain}, yarn=yarn, storage=stored)
    if compress_rates is not None:
        made = as_saved(made, *compress_rates)
    find_device(device)  # what is wrong with it is told before anything is written
    options = TinyOptions(seed, plain, storage.fused_experts, storage.shard_mb * 1_000_000, device)
    with progress_bar("drawing weights", in_bytes=False) as progress:
        spec = make_checkpoint(directory, made, options, progress)
    count = sum(file.stat().st_size for file in directory.iterdir())
    print(
        f"{directory}: {spec.family}, {spec.num_layers} layers, stored as "
        f"{spec.storage.label + ' and ' if spec.storage else ''}{plain}, "
        f"seed {seed}, {human_count(count)}B on disk"
    )


def _base_config(family: str, file: Path | None) -> JSON:
    from trueline.spec.fields import read_json
    from trueline.tiny.configs import family_config

    if file is None:
        return family_config(family)
    if family != "config":
        raise UsageError(f"family '{family}' with --config: write 'config' as the family")
    return read_json(file / "config.json" if file.is_dir() else file)


def _whole_groups(asked: TinyStorage) -> dict[str, int | str | None]:
    """Widths of experts that packed formats can have: the families' own are odd."""
    from trueline.weights.formats.fp4 import GROUP

    if asked.format not in ("int4", "fp4"):
        return {}
    group = GROUP if asked.format == "fp4" else asked.group_size
    return {"hidden_size": 3 * group, "moe_intermediate_size": 2 * group}


def _check_dims(asked: TinyDims, text: JSON) -> None:
    """A dim that the family does not have would have no effect."""
    from trueline.tiny.configs import own_name

    for name, key in KEYS.items():
        # GLM-5's configs have a head_dim that nothing is made of
        there = own_name(text, key) in text and (
            name != "linear_head" or not text.keys().isdisjoint(("layer_group_size", "o_groups"))
        )
        if getattr(asked, name) is not None and not there:
            family = text.get("model_type", "this config")
            raise UsageError(
                f"--{name.replace('_', '-')}: {family} has no such dim ({key}); leave it out"
            )


def _check_options(asked: TinyStorage) -> None:
    """An option of another format would have no effect."""
    for option, given, formats in (
        ("--fp8-block", asked.fp8_block != SIDE, ("block-fp8", "base-fp8", "fp4")),
        ("--ue8m0", asked.ue8m0, ("block-fp8", "base-fp8")),
        ("--group-size", asked.group_size != GROUP, ("int4",)),
    ):
        if given and asked.format not in formats:
            raise UsageError(f"{option}: accepted with --format {' or '.join(formats)}")
