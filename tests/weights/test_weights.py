"""The loader: every family, name and weight format, whole and divided, against the reference."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf
from trueline.errors import CheckpointError, UsageError
from trueline.models import read_model
from trueline.models.parameters import parameters
from trueline.reference import config as second_opinion
from trueline.reference.weights import load_weights as load_reference_weights
from trueline.spec.feedforward import MoESpec
from trueline.spec.mixer import MLASpec
from trueline.spec.shard import local_spec, whole_spec
from trueline.spec.source import Span
from trueline.tiny.configs import FAMILIES
from trueline.verify.cases import CASES, Subject, make_subject
from trueline.verify.checks import ledger
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.formats import Format
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.formats.pack_int4 import PackInt4
from trueline.weights.ledger import balance
from trueline.weights.load import load_weights

Tiny = Callable[..., Path]
FP8_128 = BlockFp8(block=(128, 128), power_of_two_scales=False, ignored_modules=())
# Over one block in every direction, no multiple of 128; heads of 24 + 40 cut by block edges.
LARGE = {
    "hidden_size": 150,
    "num_attention_heads": 5,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "kv_lora_rank": 131,
    "q_lora_rank": 137,
    "intermediate_size": 141,
    "moe_intermediate_size": 133,
    "num_hidden_layers": 2,
}


def as_subject(model: Path) -> Subject:
    nothing = torch.empty(0, dtype=torch.long)
    return Subject(model.name, model, nothing, nothing)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_family_and_dtype(family: str, dtype: str, tiny: Tiny) -> None:
    ledger(as_subject(tiny(family, dtype=dtype)))


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k25"])
def test_fused_experts_are_the_same(family: str, tiny: Tiny) -> None:
    plain, fused = (tiny(family, fused_experts=fuse) for fuse in (False, True))
    assert len(load_file(fused / "model.safetensors")) < len(load_file(plain / "model.safetensors"))
    ledger(as_subject(fused))
    one, two = (load_weights(d, read_model(d), dtype=torch.float32) for d in (plain, fused))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_shards_are_the_same(tiny: Tiny) -> None:
    one, many = tiny("deepseek_v2"), tiny("deepseek_v2", max_shard_bytes=200_000)
    assert len(list(many.glob("*.safetensors"))) > 3
    ledger(as_subject(many))
    a, b = (load_weights(d, read_model(d), dtype=torch.float32) for d in (one, many))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("case", hf.CASES, ids=str)
def test_checkpoints_that_transformers_saved(case: hf.Case, checkpoints: hf.Checkpoints) -> None:
    ledger(as_subject(checkpoints(case).path))


def test_precision_is_kept_where_it_decides(tiny: Tiny) -> None:
    model = tiny("deepseek_v3", dtype="bfloat16")
    values = load_weights(model, read_model(model), dtype=torch.bfloat16)
    kept = {name for name, value in values.items() if value.dtype == torch.float32}
    assert {name.split(".mlp.")[1] for name in kept} == {
        "gate.weight",
        "gate.e_score_correction_bias",
    }
    assert all(value.dtype in (torch.float32, torch.bfloat16) for value in values.values())


def test_progress_counts_every_byte(tiny: Tiny) -> None:
    model = tiny("deepseek_v3", max_shard_bytes=300_000)
    seen: list[tuple[int, int]] = []
    load_weights(
        model,
        read_model(model),
        dtype=torch.float32,
        progress=lambda done, total: seen.append((done, total)),
    )
    checkpoint = open_checkpoint(model)
    assert checkpoint is not None
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


# -- block fp8 -------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(128, 128), (32, 64)])
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k25"])
def test_block_fp8(block: tuple[int, int], ue8m0: bool, family: str, tiny: Tiny) -> None:
    storage = BlockFp8(block=block, power_of_two_scales=ue8m0, ignored_modules=())
    model = tiny(family, keys=LARGE, storage=storage, dtype="bfloat16")
    ledger(as_subject(model))
    plain = tiny(family, keys=LARGE)
    ours, exact = (load_weights(d, read_model(d), dtype=torch.float32) for d in (model, plain))
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert not torch.equal(ours[name], exact[name])
    for name, value in exact.items():  # quantised and back: e4m3 keeps about 6 % of each number
        off = (ours[name] - value).abs().amax() / value.abs().amax()
        assert off < 0.07, name


@pytest.mark.parametrize("seed", range(6))
def test_any_tensor_may_lie_in_any_shard(seed: int, tiny: Tiny, tmp_path: Path) -> None:
    """A weight and its scale too: whoever writes a checkpoint cuts it by size."""
    storage = BlockFp8(block=(32, 64), power_of_two_scales=False, ignored_modules=())
    model = tiny("deepseek_v3", keys=LARGE, storage=storage, dtype="bfloat16")
    stored, chance = load_file(model / "model.safetensors"), random.Random(seed)
    names = sorted(stored)
    chance.shuffle(names)
    count = chance.choice([2, 3, 7, len(names)])
    files = {name: f"part-{chance.randrange(count)}.safetensors" for name in names}
    for file in set(files.values()):
        save_file({name: stored[name] for name in names if files[name] == file}, tmp_path / file)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(model / "config.json", tmp_path)
    scales = [name for name in names if name.endswith("_scale_inv")]
    assert any(files[name] != files[name.removesuffix("_scale_inv")] for name in scales)
    ledger(as_subject(tmp_path))
    one, two = (load_weights(d, read_model(d), dtype=torch.float32) for d in (model, tmp_path))
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_scales_may_be_stored_as_e8m0(tiny: Tiny, tmp_path: Path) -> None:
    storage = BlockFp8(block=(128, 128), power_of_two_scales=True, ignored_modules=())
    model = tiny("deepseek_v3", keys=LARGE, storage=storage, dtype="bfloat16")

    def to_e8m0(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            tensors[name] = tensors[name].to(torch.float8_e8m0fnu)

    other = edited(model, tmp_path, to_e8m0)
    a, b = (load_weights(d, read_model(d), dtype=torch.float32) for d in (model, other))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_names_are_exempt_by_full_name(tiny: Tiny) -> None:
    exempt = ("model.layers.0.mlp.gate", "model.layers.1.mlp.experts.1", "lm_head", "re:.*o_proj")
    storage = BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=exempt)
    model = tiny("deepseek_v3", storage=storage)
    stored = load_file(model / "model.safetensors")
    fp8 = {name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn}
    assert "model.layers.0.mlp.gate_proj.weight" in fp8
    assert "model.layers.1.mlp.experts.1.up_proj.weight" not in fp8
    assert "model.layers.1.mlp.experts.11.up_proj.weight" in fp8
    assert "model.layers.1.self_attn.o_proj.weight" not in fp8
    assert not storage.exempts("model.layers.10.mlp.gate.weight")
    ledger(as_subject(model))


def test_names_are_exempt_by_their_last_parts() -> None:
    """As Ling's lists abbreviate them."""
    exempt = ("b_proj", "mlp.gate", "5.attention.g_proj")
    storage = BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=exempt)
    at = "model.layers.5.attention"
    for name in (f"{at}.b_proj", f"{at}.g_proj", "model.layers.0.mlp.gate", "b_proj"):
        assert storage.exempts(f"{name}.weight")
    for name in ("q_b_proj", "kv_b_proj", "b_proj_2", "dense"):
        assert not storage.exempts(f"{at}.{name}.weight")
    for name in ("15.attention.g_proj", "6.attention.g_proj", "5.mlp.gate_proj", "5.mlp"):
        assert not storage.exempts(f"model.layers.{name}.weight")


def test_a_long_list_of_exempt_names_is_not_gone_through_for_every_weight() -> None:
    """GLM-5's has 712 entries: 80 s of its start."""
    read = Counter[str]()

    class Entry(str):
        def startswith(self, *given: Any) -> bool:
            read[self] += 1
            return super().startswith(*given)

    exempt = tuple(Entry(f"model.layers.{i}.self_attn.indexers_proj") for i in range(50))
    formats: list[Format] = [
        BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=exempt),
        PackInt4(group=32, ignored_modules=exempt),
    ]
    for fmt in formats:
        assert [fmt.exempts(f"{name}.weight") for name in exempt] == [True] * 50
        assert not any(fmt.exempts(f"{name}_.weight") for name in exempt)
    assert max(read.values()) == 1


def test_unquantised_weights_of_an_fp8_checkpoint_are_noted(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("deepseek_v3", storage=FP8_128)

    def store_plain(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors.pop(name + "_scale_inv")
        tensors[name] = tensors[name].float()

    other = edited(model, tmp_path, store_plain)
    checkpoint = open_checkpoint(other)
    assert checkpoint is not None
    found = balance(checkpoint, read_model(other))
    assert found.balanced
    assert "1 weights are stored unquantised" in found.notes[0]


# -- divided over ranks ----------------------------------------------------------------


STORED: dict[str, dict[str, Any]] = {
    "one by one": {},
    "fused": {"fused_experts": True},
    "fp8": {"storage": BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=())},
}


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("invariant_sums", [False, True])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["by width", "whole experts"])
def test_ranks_hold_the_whole_between_them(
    expert_parallel: bool, invariant_sums: bool, size: int, stored: str, tiny: Tiny
) -> None:
    keys = {"intermediate_size": 90, "moe_intermediate_size": 24, "vocab_size": 312}
    model = tiny("deepseek_v3", keys=keys, **STORED[stored])
    spec = read_model(model)
    whole = load_weights(model, spec, dtype=torch.float32)
    how = {"invariant_sums": invariant_sums, "expert_parallel": expert_parallel}
    ranks = [local_spec(spec, rank, size, **how) for rank in range(size)]
    parts = [load_weights(model, rank, dtype=torch.float32) for rank in ranks]
    tables = [{p.name: p for p in parameters(rank)} for rank in ranks]
    for name, value in whole.items():
        shapes = [part[name].shape for part in parts]
        assert shapes == [table[name].shape for table in tables]
        dims = [d for d in range(value.dim()) if shapes[0][d] != value.shape[d]]
        if not dims:
            assert all(torch.equal(part[name], value) for part in parts)
        else:
            assert torch.equal(joined(name, [part[name] for part in parts], dims[0]), value)
        if re.search(r"(o_proj|(mlp|shared_experts)\.down_proj)\.weight", name):
            assert dims == [0 if invariant_sums else 1]  # whole sums of some, or parts of all
        elif name.endswith("experts.down_proj"):
            assert dims == [0 if expert_parallel else 1 if invariant_sums else 2]
        elif name.endswith("experts.gate_up_proj"):
            assert dims == [0 if expert_parallel else 1]
    divided = {n for n, v in whole.items() if parts[0][n].shape != v.shape}
    assert {re.sub(r".*layers\.\d+\.", "", n) for n in divided} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "self_attn.q_b_proj.weight",
        "self_attn.kv_b_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
    }


def joined(name: str, parts: Sequence[Tensor], dim: int) -> Tensor:
    """Gate and up of an expert are cut apart."""
    if dim != 1 or not name.endswith("experts.gate_up_proj"):
        return torch.cat(list(parts), dim)
    halves = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat([torch.cat(half, dim) for half in halves], dim)


def test_a_rank_keeps_every_other_fact(tiny: Tiny) -> None:
    keys = {"intermediate_size": 90, "vocab_size": 312, "moe_intermediate_size": 24}
    spec = read_model(tiny("deepseek_v2", keys=keys))
    local = local_spec(spec, 1, 2)
    assert whole_spec(local) == spec == whole_spec(local_spec(spec, 1, 2, invariant_sums=True))
    some = local_spec(spec, 1, 2, expert_parallel=True)
    assert whole_spec(some) == spec
    assert local.layers[0].mixer.heads.start == 3
    assert local.layers[0].mixer.softmax_scale == spec.layers[0].mixer.softmax_scale
    assert local.layers[0].mixer.rope == spec.layers[0].mixer.rope
    for each, experts, width in (
        (local, Span.whole(12), Span(12, 24, 24)),
        (some, Span(6, 12, 12), Span.whole(24)),
    ):
        moe = each.layers[-1].feed_forward
        assert isinstance(moe, MoESpec)
        assert (moe.experts, moe.expert_width) == (experts, width)
    assert local.layers[1].mixer is local.layers[2].mixer
    assert local_spec(spec, 0, 1) == spec


def test_what_does_not_divide(tiny: Tiny) -> None:
    spec = read_model(tiny("deepseek_v3"))
    told = r"attention heads = 6 cannot be divided by .* size 4; accepted: 1 \(all up to 128 that"
    with pytest.raises(UsageError, match=told):
        local_spec(spec, 0, 4)
    with pytest.raises(UsageError, match="dense MLP = 83"):
        local_spec(spec, 0, 2)
    even = read_model(tiny("deepseek_v3", keys={"intermediate_size": 90, "n_shared_experts": 2}))
    told = (
        r"width of a routed expert = 23 cannot be divided by .* size 2; accepted: 1 .*; "
        r"2 with experts divided whole \(with expert parallel\)"
    )
    with pytest.raises(UsageError, match=told):
        local_spec(even, 0, 2)
    twelve = {"intermediate_size": 96, "moe_intermediate_size": 24, "n_routed_experts": 12}
    with pytest.raises(UsageError, match=r"routed experts = 12 .* size 8.*; 8 with .* by width"):
        local_spec(read_model(tiny("deepseek_v3", keys=twelve)), 0, 8, expert_parallel=True)
    with pytest.raises(UsageError, match="rank 2 of 2"):
        local_spec(spec, 2, 2)
    narrow = read_model(tiny("deepseek_v3", keys={"hidden_size": 77, "intermediate_size": 90,
                                                  "moe_intermediate_size": 24}))  # fmt: skip
    assert local_spec(narrow, 0, 2).outputs is None
    with pytest.raises(UsageError, match=r"hidden size = 77 cannot be divided by .* size 2"):
        local_spec(narrow, 0, 2, invariant_sums=True)
    odd = read_model(tiny("deepseek_v3", keys={"intermediate_size": 90, "n_shared_experts": 2}))
    assert local_spec(odd, 1, 2, expert_parallel=True).vocab == odd.vocab  # 311 rows: replicated
    with pytest.raises(UsageError, match="shared experts"):
        local_spec(odd, 0, 3, expert_parallel=True)


@pytest.mark.parametrize(("size", "heads"), [(1, 64), (8, 8), (16, 4), (32, 2), (64, 1), (128, 64)])
def test_fewer_heads_than_ranks_are_replicated(size: int, heads: int, tiny: Tiny) -> None:
    """64 heads at any size; beyond it every rank has all, and all of their output projection."""
    keys = {
        "num_attention_heads": 64,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
    }
    spec = read_model(tiny("kimi_k2", keys=keys))
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, MLASpec)
    for invariant_sums, rank in ((False, 0), (True, size - 1)):
        local = local_spec(spec, rank, size, invariant_sums=invariant_sums)
        mine = local.layers[0].mixer
        assert isinstance(mine, MLASpec)
        assert mine.heads.count == heads
        table = {parameter.name: parameter for parameter in parameters(local)}
        columns = heads * mixer.v_head_dim
        shape = (128, columns) if heads == 64 or not invariant_sums else (128 // size, 64 * 11)
        assert table["model.layers.0.self_attn.o_proj.weight"].shape == shape
    if size == 128:
        assert whole_spec(local) == spec


# -- what is refused -------------------------------------------------------------------


def edited(model: Path, scratch: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a one-file checkpoint with changed tensors."""
    copy = scratch / "edited"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


KV_A = "model.layers.0.self_attn.kv_a_layernorm.weight"
UP = "model.layers.0.mlp.up_proj.weight"

PLAIN_DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], list[str]]] = {
    "missing": (lambda t: t.pop(KV_A), ["1 missing", KV_A]),
    "extra": (put("model.layers.9.x.weight", torch.ones(2)), ["1 unexpected", "layers.9.x"]),
    "renamed": (
        lambda t: t.update({KV_A + "s": t.pop(KV_A)}),
        ["1 missing", "1 unexpected", f"nearest known name is '{KV_A}'"],
    ),
    "wrong shape": (put(KV_A, torch.ones(38)), ["[38]", "wants shape [37]", "model.safetensors"]),
    "transposed": (lambda t: t.update({UP: t[UP].T.contiguous()}), ["[78, 83]", "[83, 78]"]),
    "wrong dtype": (put(KV_A, torch.ones(37, dtype=torch.int32)), ["I32", "F32, F16, BF16"]),
    "float64": (put(KV_A, torch.ones(37, dtype=torch.float64)), ["F64", "F32, F16, BF16"]),
    "fp8 unannounced": (
        lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}),
        ["F8_E4M3", "config.json has no quantization_config"],
    ),
    "fp8 norm": (lambda t: t.update({KV_A: t[KV_A].to(torch.float8_e4m3fn)}), ["F8_E4M3"]),
    "packed": (
        put("model.layers.1.mlp.experts.0.up_proj.weight_packed", torch.ones(2, 2).int()),
        ["packed integers (compressed-tensors), which no quantised weight"],
    ),
    "gptq": (put("model.layers.0.mlp.up_proj.qweight", torch.ones(2).int()), ["GPTQ or AWQ"]),
    "fp4": (put("layers.0.ffn.experts.0.w1.scale", torch.ones(2)), ["fp4"]),
    "fused and one by one": (
        put("model.layers.1.mlp.experts.down_proj", torch.ones(12, 78, 23)),
        ["12 unexpected", "experts.0.down_proj.weight"],
    ),
    "mtp layer unannounced": (
        put("model.layers.4.eh_proj.weight", torch.ones(2)),
        ["1 unexpected", "layers.4.eh_proj"],
    ),
}


@pytest.mark.parametrize("name", PLAIN_DAMAGE)
def test_refused(name: str, tiny: Tiny, tmp_path: Path) -> None:
    change, parts = PLAIN_DAMAGE[name]
    model = edited(tiny("deepseek_v3"), tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, read_model(model), dtype=torch.float32)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


FP8_DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scale": (lambda t: t.pop(UP + "_scale_inv"), "its '.*_scale_inv' is missing"),
    "scale alone": (lambda t: t.update({UP: torch.zeros(83, 78)}), "unexpected: .*_scale_inv"),
    "scale shape": (put(UP + "_scale_inv", torch.ones(3, 1)), r"F32 or F8_E8M0 \[3, 3\]"),
    "scale dtype": (put(UP + "_scale_inv", torch.ones(3, 3).half()), "F32 or F8_E8M0"),
    "scale nan": (put(UP + "_scale_inv", torch.full((3, 3), float("nan"))), "finite"),
    "scale negative": (put(UP + "_scale_inv", -torch.ones(3, 3)), "positive"),
    "not a power of two": (put(UP + "_scale_inv", torch.full((3, 3), 3.0)), "powers of two"),
}


@pytest.mark.parametrize("name", FP8_DAMAGE)
def test_refused_fp8(name: str, tiny: Tiny, tmp_path: Path) -> None:
    storage = BlockFp8(block=(32, 32), power_of_two_scales=True, ignored_modules=())
    change, message = FP8_DAMAGE[name]
    model = edited(tiny("deepseek_v3", storage=storage), tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, read_model(model), dtype=torch.float32)


def test_gptq_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    copy = tmp_path / "gptq"
    shutil.copytree(tiny("kimi_k25"), copy)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "format": "marlin"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"stored as gptq \(marlin\)"):
        load_weights(copy, read_model(copy), dtype=torch.float32)


def test_no_weights(tiny: Tiny, tmp_path: Path) -> None:
    spec = read_model(tiny("deepseek_v3"))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files"):
        load_weights(tmp_path, spec, dtype=torch.float32)


def test_two_names_for_one_tensor(tiny: Tiny, tmp_path: Path) -> None:
    name = "model.norm.weight"

    def twice(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.language_model.{name.removeprefix('model.')}"] = torch.ones(78)

    model = edited(tiny("kimi_k25"), tmp_path, twice)
    with pytest.raises(CheckpointError, match=f"both mean '{name}'"):
        load_weights(model, read_model(model), dtype=torch.float32)


def test_a_tied_head_must_not_be_stored(tiny: Tiny, tmp_path: Path) -> None:
    model = edited(
        tiny("deepseek_v2", keys={"tie_word_embeddings": True}),
        tmp_path,
        put("lm_head.weight", torch.ones(311, 78)),
    )
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_weights(model, read_model(model), dtype=torch.float32)


def test_mtp_and_vision_are_unused_by_choice(tiny: Tiny, tmp_path: Path) -> None:
    subject = make_subject("v3-mtp", tmp_path / "mtp")
    checkpoint = open_checkpoint(subject.model)
    assert checkpoint is not None
    found = balance(checkpoint, read_model(subject.model))
    (reason,) = found.unused
    assert "MTP" in reason
    assert CASES["v3-mtp"].mtp
    model = edited(
        tiny("kimi_k25"), tmp_path, put("vision_tower.encoder.blocks.0.wo.bias", torch.ones(3))
    )
    checkpoint = open_checkpoint(model)
    assert checkpoint is not None
    (reason,) = balance(checkpoint, read_model(model)).unused
    assert "image inputs are refused" in reason


def test_the_reference_refuses_the_same(tiny: Tiny, tmp_path: Path) -> None:
    model = edited(tiny("deepseek_v3"), tmp_path, put("model.layers.0.odd.weight", torch.ones(1)))
    config = second_opinion.read_config(model)
    with pytest.raises(CheckpointError, match=r"layers\.0\.odd"):
        load_reference_weights(model, config, torch.float32)
