"""How `reference/` reads DeepSeek V4's checkpoints: names of three writers, fp8 and fp4, Base."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf_v4
from hf import edit_config
from hf_v4 import ALL, SLIDING, SPARSE, VOCAB, V4Case, V4Checkpoint
from trueline import reference
from trueline.errors import CheckpointError

Checkpoints = Callable[[V4Case], V4Checkpoint]
Tensors = dict[str, Tensor]

MAIN = V4Case("main")
TOKENS = torch.randint(VOCAB, (23,), generator=torch.Generator().manual_seed(4))

# As in the published files, from the names in transformers' memory.
PUBLISHED = {
    "model.": "",
    "embed_tokens": "embed",
    "lm_head": "head",
    "hc_head.hc_": "hc_head_",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn_hc.": "hc_attn_",
    "ffn_hc.": "hc_ffn_",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "self_attn.compressor.indexer.": "attn.indexer.compressor.",
    "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "self_attn.": "attn.",
    "sinks": "attn_sink",
    "position_bias": "ape",
    "q_a_norm": "q_norm",
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "shared_experts.gate_proj": "shared_experts.w1",
    "shared_experts.up_proj": "shared_experts.w3",
    "shared_experts.down_proj": "shared_experts.w2",
    "kv_proj": "wkv",
    "gate_proj": "wgate",
    "mlp.": "ffn.",
    "gate.e_score_correction_bias": "gate.bias",
}


def publish(in_memory: Tensors) -> Tensors:
    found: Tensors = {}
    for name, tensor in in_memory.items():
        for theirs, ours in PUBLISHED.items():
            name = name.replace(theirs, ours)
        stem, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            for e, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                found[f"{stem}.experts.{e}.w1.weight"] = gate.clone()
                found[f"{stem}.experts.{e}.w3.weight"] = up.clone()
        elif last == "down_proj":
            for e, down in enumerate(tensor):
                found[f"{stem}.experts.{e}.w2.weight"] = down.clone()
        else:
            found[name] = tensor
    return found


def write(source: Path, target: Path, tensors: Tensors, **config: Any) -> Path:
    target.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", target / "config.json")
    edit_config(target, **config)
    save_file(tensors, target / "model.safetensors")
    return target


def assert_same(left: Path, right: Path) -> None:
    ours, theirs = reference.load(left).params, reference.load(right).params
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_names_of_three_writers(v4_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As published, as save_pretrained writes them, and as it does when told to keep its own."""
    checkpoint = v4_checkpoints(MAIN)
    in_memory = checkpoint.model.float().state_dict()
    saved = load_file(checkpoint.path / "model.safetensors")
    assert {"head.weight", "model.hc_head.hc_fn", "model.layers.0.attn.norm.weight"} <= saved.keys()
    published = publish(in_memory)
    assert {"head.weight", "hc_head_fn", "layers.0.attn.kv_norm.weight"} <= published.keys()
    assert len(published) == len(saved)
    for place, tensors in (("published", published), ("in-memory", in_memory)):
        assert_same(write(checkpoint.path, tmp_path / place, tensors), checkpoint.path)
    # and transformers itself takes what is called published here for the same model
    theirs = transformers.DeepseekV4ForCausalLM.from_pretrained(
        tmp_path / "published", attn_implementation="eager", experts_implementation="eager"
    )
    again = theirs.state_dict()
    assert again.keys() == in_memory.keys()
    assert all(torch.equal(again[name], in_memory[name]) for name in again)


def test_drafts_are_left_and_others_refused(v4_checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = v4_checkpoints(MAIN)
    tensors = publish(checkpoint.model.float().state_dict())

    def other(**change: Tensor | None) -> Path:
        merged = tensors | {name.replace("__", "."): value for name, value in change.items()}
        kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
        return write(checkpoint.path, tmp_path, kept)

    one = torch.ones(2)
    drafts = other(mtp__0__attn__wq_a__weight=one, mtp__0__hc_head_fn=one.clone())
    assert_same(drafts, checkpoint.path)
    for name in (
        "layers__0__attn__compressor__ape",
        "layers__0__ffn__gate__bias",
        "e_proj__weight",
    ):
        with pytest.raises(CheckpointError, match="does not use"):
            reference.load(other(**{name: one}))
    for name in ("layers__0__ffn__gate__tid2eid", "layers__1__attn__attn_sink", "head__weight"):
        with pytest.raises(CheckpointError, match="missing"):
            reference.load(other(**{name: None}))


def test_tied_head(v4_checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = v4_checkpoints(MAIN)
    tensors = publish(checkpoint.model.float().state_dict())
    del tensors["head.weight"]
    path = write(checkpoint.path, tmp_path, tensors, tie_word_embeddings=True)
    params = reference.load(path).params
    assert torch.equal(params["lm_head.weight"], params["model.embed_tokens.weight"])


# Quantised

WIDE = V4Case(
    "quantised",
    layers=(SLIDING, SPARSE, ALL),
    keys={"hidden_size": 96, "moe_intermediate_size": 32},
)
ROUTED = re.compile(r".*\.ffn\.experts\.\d+\.w\d\.weight")
COARSE = re.compile(r".*(\.wq_a|\.wq_b|\.attn\.wkv|\.wo_a|\.wo_b|shared_experts\.w\d)\.weight")
BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4_codes(shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Packed, scales, and the numbers they stand for, one after the other."""
    rows, columns = shape
    codes = torch.randint(16, (rows, columns), generator=generator)
    powers = torch.randint(-7, 1, (rows, columns // 32), generator=generator)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    values = [
        [
            E2M1[code % 8] * (-1 if code > 7 else 1) * 2.0 ** int(powers[row, column // 32])
            for column, code in enumerate(line)
        ]
        for row, line in enumerate(codes.tolist())
    ]
    scales = (powers + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return packed, scales, torch.tensor(values)


def fp8_codes(weight: Tensor, e8m0: bool, generator: torch.Generator) -> tuple[Tensor, ...]:
    blocks = [-(-size // BLOCK) for size in weight.shape]
    powers = torch.randint(-3, 4, blocks, generator=generator)
    scales = 2.0**powers if e8m0 else 2.0**powers * torch.rand(blocks, generator=generator)
    codes = weight.to(torch.float8_e4m3fn)
    rows, columns = (torch.arange(size) // BLOCK for size in weight.shape)
    values = codes.float() * scales[rows][:, columns]
    return codes, scales.to(torch.float8_e8m0fnu) if e8m0 else scales, values


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_quantised(experts: str, v4_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The numbers of the codes, edge blocks included; Base has fp8 experts and float32 scales."""
    checkpoint = v4_checkpoints(WIDE)
    plain = publish(checkpoint.model.float().state_dict())
    stored, generator = dict(plain), torch.Generator().manual_seed(3)
    for name, weight in list(plain.items()):
        if experts == "fp4" and ROUTED.fullmatch(name):
            found = fp4_codes(weight.shape, generator)
        elif ROUTED.fullmatch(name) or COARSE.fullmatch(name):
            found = fp8_codes(weight, experts == "fp4", generator)
        else:
            continue
        stored[name], stored[name.replace(".weight", ".scale")], plain[name] = found
    quantisation = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    coded = write(
        checkpoint.path,
        tmp_path / "coded",
        stored,
        quantization_config=quantisation,
        expert_dtype=experts,
    )
    assert_same(coded, write(checkpoint.path, tmp_path / "plain", plain))
    assert reference.load(coded).logprobs(TOKENS).isfinite().all()
    rounded = reference.load(coded, numerics="activations").logprobs(TOKENS)
    assert (rounded - reference.load(coded).logprobs(TOKENS)).abs().max() > 1e-4
    if experts == "fp4":
        edit_config(coded, expert_dtype="fp8")
        with pytest.raises(CheckpointError, match=r"int8, and expert_dtype is not fp4"):
            reference.load(coded)


def test_a_file_that_transformers_saved_gives_its_logits(v4_checkpoints: Checkpoints) -> None:
    checkpoint = v4_checkpoints(WIDE)
    ours = reference.load(checkpoint.path).logprobs(TOKENS)
    assert (ours - checkpoint.exact_logprobs(TOKENS)).abs().max() <= hf_v4.EXACT_GATE
