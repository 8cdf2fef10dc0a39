"""Checkpoint files -> plain tensors under published names, without the engine's loader."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trueline.errors import CheckpointError, ConfigError
from trueline.reference import v4_names
from trueline.reference.config import Config
from trueline.reference.functional import Fp8Inputs, Params
from trueline.reference.published import Published
from trueline.reference.quantised import Quantised, fp4, int4

SCALE = ".weight_scale_inv"  # the name says inverse, the value is not: W = fp8 * scale
PLAIN_SCALE = ".scale"

# A tensor outside this list would silently have no effect, so it is refused.
KNOWN = re.compile(
    r"(model\.embed_tokens|model\.norm|lm_head"
    r"|model\.layers\.\d+\.((input|post_attention)_layernorm"
    r"|self_attn\.(q_proj|q_a_proj|q_a_layernorm|q_b_proj|o_proj)"
    r"|self_attn\.(kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj)"
    r"|mlp\.((shared_experts|experts\.\d+)\.)?(gate|up|down)_proj"
    r"|mlp\.gate))\.weight|model\.layers\.\d+\.mlp\.gate\.e_score_correction_bias"
)

KNOWN_LINEAR = (
    r"model\.layers\.\d+\.self_attn\."
    r"(query_key_value|query_layernorm|key_layernorm|g_proj|g_norm)\.weight"
)
KNOWN_INDEXER = (
    r"model\.layers\.\d+\.self_attn\.indexer\."
    r"((wq_b|wk|k_norm|weights_proj)\.weight|k_norm\.bias)"
)
# They decide near-ties, of experts and of keys: never below float32.
PRECISE = ("e_score_correction_bias", "indexer.weights_proj.weight")
ENDS = "ends"
Prefix = str | tuple[str, ...]
SHORTEST = 1e-7  # the least length of a column that norm_head divides by


def load_weights(
    model_dir: str | Path,
    config: Config,
    dtype: torch.dtype,
    numerics: str = "weights",
    part: Prefix | None = None,
    device: str | torch.device = "cpu",
) -> Params:
    """Every tensor of the model, unquantised, experts one by one. Numerics `weights`: that is all.
    `activations`: what is multiplied with weights of fp8 or fp4 goes through fp8 first.
    `published`: see there. `part`: only what begins so, as `model.layers.3.`, or ENDS: what no
    layer has."""
    tensors = read_tensors(Path(model_dir), config, part, device)
    weights = named_weights(unquantised(tensors, config.quantised), config, dtype, part)
    if numerics == "weights":
        return weights
    if numerics == "published" and config.v4 is not None:
        return Published(weights)
    if numerics != "activations":
        raise ConfigError(
            f"numerics '{numerics}' of {config.family}; the reference has 'weights', "
            "'activations', and for deepseek_v4 'published'"
        )
    coded = (torch.float8_e4m3fn, torch.int8, torch.uint8)
    modules = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dtype in coded
    ]
    return Fp8Inputs(weights, modules, config.quantised.powers_of_two)


def named_weights(
    stored: dict[str, Tensor], config: Config, dtype: torch.dtype, part: Prefix | None = None
) -> Params:
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        weights.update(unfuse(name, tensor.to(dtype_of(name, dtype))))
    whole = part in (None, ENDS)
    if config.v4 is not None:
        refuse_other_names(weights, config, part)
        return with_tied_head(weights, config) if whole else weights
    known = "|".join(
        pattern
        for pattern, there in (
            (KNOWN.pattern, True),
            (KNOWN_LINEAR, config.linear is not None),
            (KNOWN_INDEXER, config.indexer is not None),
        )
        if there
    )
    if unknown := sorted(name for name in weights if not re.fullmatch(known, name)):
        raise CheckpointError(f"tensors the reference does not use: {', '.join(unknown[:8])}")
    if not whole:
        return weights
    with_tied_head(weights, config)
    if config.norm_head:
        weights["lm_head.weight"] = unit_columns(stored["lm_head.weight"].double()).to(dtype)
    return weights


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    if name.endswith(".tid2eid"):
        return torch.int64
    precise = name.endswith(PRECISE) or v4_names.PRECISE.fullmatch(name)
    return torch.promote_types(dtype, torch.float32) if precise else dtype


def with_tied_head(weights: Params, config: Config) -> Params:
    if config.tie_word_embeddings:
        embedding = weights["model.embed_tokens.weight"]
        if not torch.equal(weights.setdefault("lm_head.weight", embedding), embedding):
            raise CheckpointError("lm_head.weight differs from the embedding it is tied to")
    return weights


def refuse_other_names(weights: Params, config: Config, part: Prefix | None) -> None:
    wanted = {name for name in v4_names.names(config) if is_of(name, part)}
    if config.tie_word_embeddings:
        wanted.discard("lm_head.weight")
    if unknown := sorted(weights.keys() - wanted - {"lm_head.weight"}):
        raise CheckpointError(f"tensors the reference does not use: {', '.join(unknown[:8])}")
    if missing := sorted(wanted - weights.keys()):
        raise CheckpointError(f"tensors that are missing: {', '.join(missing[:8])}")


def unquantised(stored: dict[str, Tensor], facts: Quantised) -> dict[str, Tensor]:
    """Every weight under the name of its module, with its numbers; scales go with their weights."""
    found = dict(stored)

    def take(name: str) -> Tensor:
        if name not in found:
            raise CheckpointError(f"{name} is missing")
        return found.pop(name)

    for name, tensor in stored.items():
        module = name.rpartition(".")[0]
        if name.endswith(".weight_packed") and facts.int4_group is not None:
            scale, shape = (take(f"{module}.weight_{part}") for part in ("scale", "shape"))
            found[f"{module}.weight"] = int4(found.pop(name), scale, shape, facts.int4_group)
        elif tensor.dtype in (torch.int8, torch.uint8) and name.endswith(".weight"):
            if not facts.fp4_experts:
                raise CheckpointError(f"{name}: {tensor.dtype}, and expert_dtype is not fp4")
            found[name] = fp4(tensor, take(module + PLAIN_SCALE))
        elif tensor.dtype == torch.float8_e4m3fn:
            if facts.fp8_block is None:
                raise CheckpointError(f"{name}: float8, and config.json has no block size")
            scale = take(module + (PLAIN_SCALE if facts.plain_scale_names else SCALE))
            found[name] = dequantise(tensor, scale, facts.fp8_block)
    return found


def unit_columns(head: Tensor) -> Tensor:
    """Each hidden channel at length one over the vocabulary (not each word over the channels)."""
    return head / head.square().sum(0).sqrt().clamp_min(SHORTEST)


def read_tensors(
    model_dir: Path,
    config: Config,
    part: Prefix | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        held: dict[str, str] = json.loads(index.read_text())["weight_map"]
        of_part = {f for stored, f in held.items() if is_of(renamed(stored, config), part)}
        files = sorted(model_dir / f for f in of_part)
    else:
        files = sorted(model_dir.glob("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt", device=str(device)) as handle:
            for stored_name in list(handle.keys()):
                name = renamed(stored_name, config)
                if is_foreign(name, config) or not is_of(name, part):
                    continue
                if name in tensors:
                    raise CheckpointError(f"{name} is stored twice, the second time in {file.name}")
                tensors[name] = handle.get_tensor(stored_name)
    return tensors


def stored_dtypes(model_dir: Path, config: Config) -> dict[str, torch.dtype]:
    """Of the weights that are stored as plain floats, experts one by one."""
    found: dict[str, torch.dtype] = {}
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for stored_name in list(handle.keys()):
                name, piece = renamed(stored_name, config), handle.get_slice(stored_name)
                if (dtype := plain.get(piece.get_dtype())) is None or is_foreign(name, config):
                    continue
                empty = torch.empty(*piece.get_shape(), device="meta")
                found |= {each: dtype for each, _ in unfuse(name, empty)}
    return found


def is_of(name: str, part: Prefix | None) -> bool:
    if part == ENDS:
        return not name.startswith("model.layers.")
    return part is None or name.startswith(part)


def renamed(stored: str, config: Config) -> str:
    """As the DeepSeek line has it."""
    name = canonical_name(stored)
    if config.linear is not None:
        name = bailing_name(name)
    return name if config.v4 is None else v4_names.renamed(name)


def canonical_name(name: str) -> str:
    """K2.5 puts the text model under a prefix: published, in memory, and as transformers saves."""
    name = re.sub(r"^model\.language_model\.", "model.", name)
    name = re.sub(r"^language_model\.", "", name)
    return re.sub(r"^model\.blocks\.", "model.layers.", name)


def bailing_name(name: str) -> str:
    """Ling's names -> those of the DeepSeek line, where both have the thing."""
    for pattern, ours in (
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.", ".self_attn."),
        (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    ):
        name = re.sub(pattern, ours, name)
    return name


def is_foreign(name: str, config: Config) -> bool:
    """Vision parts, MTP layers (after the last decoder layer), tables that old files carry,
    indexers of layers that share another's selection."""
    if config.v4 is not None and v4_names.DRAFTS.match(name):
        return True
    if re.match(r"(model\.)?(vision_tower|mm_projector)\.|.*rotary_emb\.inv_freq$", name):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.(self_attn\.indexer\.)?", name)
    if layer is None:
        return False
    number, of_indexer = int(layer[1]), layer[2] is not None
    if number >= config.num_hidden_layers:
        return True
    return of_indexer and config.indexer is not None and config.indexer.shared[number]


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """W[o, i] = fp8[o, i] * scale[o // rows, i // columns] in float32; edge blocks are cut off."""
    (rows, columns), (out, inner) = block, weight.shape
    if scale.shape != (-(-out // rows), -(-inner // columns)):
        raise CheckpointError(f"scales {tuple(scale.shape)} for {tuple(weight.shape)} by {block}")
    full = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight.float() * full[:out, :inner]


def unfuse(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """`experts.gate_up_proj` [E, 2I, D] (gate rows first), `experts.down_proj` [E, D, I]."""
    stem, _, last = name.rpartition(".")
    if not stem.endswith(".experts"):
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        if last == "gate_up_proj":
            gate, up = matrix.chunk(2)
            yield f"{stem}.{expert}.gate_proj.weight", gate
            yield f"{stem}.{expert}.up_proj.weight", up
        else:
            yield f"{stem}.{expert}.{last}.weight", matrix
