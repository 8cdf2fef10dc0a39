"""Checkpoints in each stored format: divided over ranks, cut into any files, damaged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trueline.describe import describe
from trueline.errors import CheckpointError
from trueline.models import read_model
from trueline.reference.config import read_config
from trueline.reference.weights import load_weights as load_reference_weights
from trueline.spec.shard import local_spec
from trueline.verify.cases import BASE_FP8, FP4, FP8_32, INT4, INT4_ALL
from trueline.weights.checkpoint import DTYPE_BITS, StoredTensor, open_checkpoint
from trueline.weights.formats import Format, Storage
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.formats.pack_int4 import PackInt4
from trueline.weights.ledger import balance
from trueline.weights.load import StoredWeights, load_weights

Tiny = Callable[..., Path]

# What 16 ranks can divide; each has heads of 11 channels and 10 columns of the dense MLP, so that
# their edges fall into words, groups and blocks at every residue.
RANKED = {
    "first_k_dense_replace": 1,
    "hidden_size": 96,
    "intermediate_size": 160,
    "kv_lora_rank": 48,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_attention_heads": 16,
    "num_hidden_layers": 2,
    "q_lora_rank": 64,
    "v_head_dim": 11,
    "vocab_size": 320,
}


@dataclass(frozen=True)
class Published:
    family: str
    storage: Storage


UE8M0 = BlockFp8(block=(32, 48), power_of_two_scales=True, ignored_modules=("mlp.up_proj",))
STORED = {
    "block fp8": Published("deepseek_v3", FP8_32),
    "block fp8, e8m0": Published("kimi_k25", UE8M0),
    "int4": Published("kimi_k25", INT4),
    "int4 of all": Published("kimi_k2", INT4_ALL),
    "int4 in groups of 16": Published("kimi_k2", PackInt4(group=16, ignored_modules=("lm_head",))),
    "fp4": Published("deepseek_v3", FP4),
}


@pytest.fixture(scope="module")
def made(tiny: Tiny) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        stored = STORED[name]
        return tiny(stored.family, keys=RANKED, storage=stored.storage, dtype="bfloat16")

    return make


@pytest.fixture(scope="module")
def plain(made: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same numbers in float32, as the reference dequantises them."""

    @cache
    def make(name: str) -> Path:
        model = made(name)
        copy = tmp_path_factory.mktemp("plain")
        config = json.loads((model / "config.json").read_text())
        config.pop("quantization_config")
        (copy / "config.json").write_text(json.dumps(config))
        weights = load_reference_weights(model, read_config(model), torch.float32)
        save_file(weights, copy / "model.safetensors")
        return copy

    return make


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", STORED)
def test_a_shard_dequantised_is_a_shard_of_the_dequantised(
    name: str, size: int, made: Any, plain: Any
) -> None:
    ours, exact = read_model(made(name)), read_model(plain(name))
    for rank in range(0, size, max(size // 4, 1)):
        parts = (
            load_weights(
                model,
                local_spec(spec, rank, size, invariant_sums=rank % 2 == 1),
                dtype=torch.float32,
            )
            for model, spec in ((made(name), ours), (plain(name), exact))
        )
        shard, wanted = parts
        assert shard.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[key]) for key, value in shard.items())


@pytest.mark.parametrize("name", ["int4", "fp4"])
def test_experts_one_by_one(name: str, made: Any, plain: Any) -> None:
    model = made(name)
    weights = StoredWeights(model, read_model(model), dtype=torch.float32)
    exact = load_weights(plain(name), read_model(plain(name)), dtype=torch.float32)
    for key in ("gate_up_proj", "down_proj"):
        stacked = weights.pop(f"model.layers.1.mlp.experts.{key}")
        assert stacked.format == name
        for expert, matrix in enumerate(stacked.unstack()):
            wanted = exact[f"model.layers.1.mlp.experts.{key}"][expert]
            assert torch.equal(matrix.dequantise(), wanted)


@pytest.mark.parametrize("name", STORED)
def test_any_tensor_may_lie_in_any_file(name: str, made: Any, tmp_path: Path) -> None:
    """In some files, and one in each."""
    model = made(name)
    stored = load_file(model / "model.safetensors")
    one = load_weights(model, read_model(model), dtype=torch.float32)
    for count in (3, None):
        copy = tmp_path / str(count)
        copy.mkdir()
        names = sorted(stored)
        chance = random.Random(len(names))
        chance.shuffle(names)
        files = {
            key: f"part-{chance.randrange(count) if count else place}.safetensors"
            for place, key in enumerate(names)
        }
        for file in set(files.values()):
            save_file({key: stored[key] for key in names if files[key] == file}, copy / file)
        index = {"metadata": {}, "weight_map": files}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(model / "config.json", copy)
        two = load_weights(copy, read_model(copy), dtype=torch.float32)
        assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_a_checkpoint_has_several_formats(made: Any) -> None:
    checkpoint = open_checkpoint(made("fp4"))
    assert checkpoint is not None
    uses = balance(checkpoint, read_model(made("fp4"))).uses
    of_experts = {use.format.label for use in uses if ".experts." in use.tensor.name}
    others = {use.format.label for use in uses if ".experts." not in use.tensor.name}
    assert (of_experts, others) == ({"fp4"}, {"block fp8", "dense"})


def test_an_expression_fits_the_beginning_of_a_name() -> None:
    """Of a module, and need not reach its end; test_compressed_tensors.py asks the package."""
    ours = PackInt4(group=32, ignored_modules=("re:layers.1", "re:model.layers.2.mlp", "mlp"))
    assert not ours.exempts("model.layers.1.mlp.up_proj.weight")
    assert ours.exempts("model.layers.2.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("name", "bits"), [("int4", 4 + 16 / 32 + 128 / (64 * 96)), ("fp4", 4 + 8 / 32)]
)
def test_the_ledger_by_format(name: str, bits: float, made: Any) -> None:
    """Bytes are those of the files, bits those of a number and its share of scale and shape."""
    report = describe(made(name))["checkpoint"]
    formats = report["formats"]
    assert sum(each["bytes"] for each in formats.values()) == report["bytes"]
    for each in formats.values():
        for key in ("weights", "parameters", "bytes"):
            assert each[key] == sum(group[key] for group in each["groups"].values())
    assert (
        sum(each["parameters"] for each in formats.values())
        == describe(made(name))["parameters"]["total"]
    )
    experts = formats[name]["groups"]
    assert experts.keys() == {"routed experts"}
    assert experts["routed experts"]["weights"] == 16 * 3
    assert experts["routed experts"]["parameters"] == 16 * 3 * 64 * 96
    assert experts["routed experts"]["bits"] == pytest.approx(bits, abs=5e-4)
    dense = set(formats["dense"]["groups"])
    assert {"embedding and head", "norms", "routers"} <= dense
    assert ("attention" in dense) == (name == "int4")


# -- damage ----------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor]], Any]
UP = "model.layers.1.mlp.experts.3.up_proj"
DENSE_UP = "model.layers.0.mlp.up_proj"
E8M0 = torch.float8_e8m0fnu


def put(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def byte(name: str, value: int) -> Change:
    """One byte of a tensor, wherever it is small enough to see."""

    def change(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.view(torch.uint8)[-1, -1] = value
        return copy

    return put(name, change)


INT4_DAMAGE: dict[str, tuple[Change, str]] = {
    "no scale": (lambda t: t.pop(f"{UP}.weight_scale"), f"its '{UP}.weight_scale' is missing"),
    "no shape": (lambda t: t.pop(f"{UP}.weight_shape"), f"its '{UP}.weight_shape' is missing"),
    "no packs": (lambda t: t.pop(f"{UP}.weight_packed"), f"1 missing: {UP}.weight"),
    "zero point": (
        lambda t: t.update({f"{UP}.weight_zero_point": torch.zeros(8, 3).int()}),
        "weight_zero_point' .*only symmetric",
    ),
    "order": (
        lambda t: t.update({f"{UP}.weight_g_idx": torch.zeros(96).int()}),
        "weight_g_idx' .*actorder",
    ),
    "shape transposed": (put(f"{UP}.weight_shape", lambda s: s.flip(0)), r"holds \[96, 64\]"),
    "shape of words": (put(f"{UP}.weight_shape", lambda s: s // 8), r"accepted: \[64, 96\]"),
    "shape is float": (put(f"{UP}.weight_shape", Tensor.float), r"I64 or I32 \[2\]"),
    "packs transposed": (
        put(f"{UP}.weight_packed", lambda p: p.T.contiguous()),
        r"accepted: I32 \[64, 12\]",
    ),
    "packs of bytes": (put(f"{UP}.weight_packed", lambda p: p.view(torch.int8)), "accepted: I32"),
    "scales transposed": (
        put(f"{UP}.weight_scale", lambda s: s.T.contiguous()),
        r"F32 or F16 or BF16 \[64, 3\]",
    ),
    "scales are integers": (put(f"{UP}.weight_scale", Tensor.int), "F32 or F16 or BF16"),
    "scale nan": (put(f"{UP}.weight_scale", lambda s: s * float("nan")), "positive, finite"),
    "scale inf": (put(f"{UP}.weight_scale", lambda s: s * float("inf")), "positive, finite"),
    "scale negative": (put(f"{UP}.weight_scale", lambda s: -s), "positive, finite"),
    "scale zero": (put(f"{UP}.weight_scale", torch.zeros_like), "positive, finite"),
    "plain too": (
        lambda t: t.update({f"{UP}.weight": torch.ones(64, 96)}),
        f"1 unexpected: .*{UP}.weight'",
    ),
    "exempt all the same": (
        lambda t: (
            t.update(
                {
                    key.replace("experts.3", "shared_experts"): value.clone()
                    for key, value in t.items()
                    if key.startswith(f"{UP}.")
                }
                | {
                    "model.layers.1.mlp.shared_experts.up_proj.weight_packed": torch.ones(
                        64, 12
                    ).int()
                }
            )
            or t.pop("model.layers.1.mlp.shared_experts.up_proj.weight")
        ),
        "exempts it by name",
    ),
}
FP4_DAMAGE: dict[str, tuple[Change, str]] = {
    "no scale": (lambda t: t.pop(f"{UP}.scale"), f"its '{UP}.scale' is missing"),
    "packs transposed": (
        put(f"{UP}.weight", lambda p: p.T.contiguous()),
        r"I8 or U8 \[64, 48\], two numbers in a byte",
    ),
    "packs are words": (put(f"{UP}.weight", lambda p: p.view(torch.int32)), "accepted: I8 or U8"),
    "scales transposed": (put(f"{UP}.scale", lambda s: s.T.contiguous()), r"F8_E8M0 \[64, 3\]"),
    "scales are bytes": (put(f"{UP}.scale", lambda s: s.view(torch.uint8)), "accepted: F8_E8M0"),
    "scales are float": (put(f"{UP}.scale", Tensor.float), "accepted: F8_E8M0"),
    "scale nan": (byte(f"{UP}.scale", 255), "holds 255; accepted: 0 to 252"),
    "scale too large": (byte(f"{UP}.scale", 253), "holds 253; accepted: 0 to 252"),
    "block scale nan": (byte(f"{DENSE_UP}.scale", 255), "positive, finite"),
    "block scale float": (put(f"{DENSE_UP}.scale", Tensor.float), r"accepted: F8_E8M0 \[5, 3\]"),
    "nan code": (byte(f"{DENSE_UP}.weight", 0x7F), "NaN codes"),
    "negative nan code": (byte(f"{DENSE_UP}.weight", 0xFF), "NaN codes"),
    "v3's name of scales": (
        lambda t: t.update({f"{DENSE_UP}.weight_scale_inv": t.pop(f"{DENSE_UP}.scale")}),
        f"its '{DENSE_UP}.scale' is missing",
    ),
}
FP8_DAMAGE: dict[str, tuple[Change, str]] = {
    "nan code": (byte(f"{UP}.weight", 0x7F), "NaN codes"),
    "negative nan code": (byte(f"{UP}.weight", 0xFF), "NaN codes"),
    "scale nan": (
        put(f"{UP}.weight_scale_inv", lambda s: torch.full_like(s, float("nan")).to(E8M0)),
        "positive, finite",
    ),
    "v4's name of scales": (
        lambda t: t.update({f"{UP}.scale": t.pop(f"{UP}.weight_scale_inv").to(E8M0)}),
        f"its '{UP}.weight_scale_inv' is missing",
    ),
}
DAMAGE = {
    (name, what): done
    for name, damage in (
        ("int4 of all", {k: v for k, v in INT4_DAMAGE.items() if k == "no packs"}),
        ("int4", INT4_DAMAGE),
        ("fp4", FP4_DAMAGE),
        ("block fp8", FP8_DAMAGE),
    )
    for what, done in damage.items()
}


@pytest.mark.parametrize(("name", "what"), DAMAGE, ids=lambda value: value)
def test_damage_is_named(name: str, what: str, made: Any, tmp_path: Path) -> None:
    change, message = DAMAGE[name, what]
    model = made(name)
    prefix = "language_model." if STORED[name].family == "kimi_k25" else ""
    stored = {k.removeprefix(prefix): v for k, v in load_file(model / "model.safetensors").items()}
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path, read_model(tmp_path), dtype=torch.float32)


# Of each tensor of a weight [64, 96]: its shape, and the dtypes that its publishers write.
TAKEN: dict[str, tuple[Format, list[tuple[tuple[int, ...], set[str]]]]] = {
    "block fp8": (FP8_32, [((64, 96), {"F8_E4M3"}), ((2, 3), {"F32", "F8_E8M0"})]),
    "base fp8": (BASE_FP8, [((64, 96), {"F8_E4M3"}), ((2, 3), {"F32"})]),
    "beside fp4": (FP4.others, [((64, 96), {"F8_E4M3"}), ((2, 3), {"F8_E8M0"})]),
    "fp4": (FP4.routed, [((64, 48), {"I8", "U8"}), ((64, 3), {"F8_E8M0"})]),
    "int4": (
        INT4,
        [((64, 12), {"I32"}), ((64, 3), {"F32", "F16", "BF16"}), ((2,), {"I64", "I32"})],
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_no_other_dtype_is_taken(name: str) -> None:
    """Of all that safetensors knows, in each tensor of a weight; nor another shape."""
    format_, tensors = TAKEN[name]

    def problem(at: int, shape: tuple[int, ...], dtype: str) -> str | None:
        stored = [
            StoredTensor(
                name=f"w.{i}", dtype=min(dtypes), shape=size, file=Path("f"), begin=0, end=0
            )
            for i, (size, dtypes) in enumerate(tensors)
        ]
        stored[at] = replace(stored[at], dtype=dtype, shape=shape)
        return format_.problem((64, 96), stored)

    for at, (shape, dtypes) in enumerate(tensors):
        assert {each for each in DTYPE_BITS if problem(at, shape, each) is None} == dtypes
        for wrong in ((shape[0] + 1, *shape[1:]), (*shape[:-1], shape[-1] - 1), (*shape, 1)):
            for dtype in dtypes:
                found = problem(at, wrong, dtype)
                assert found is not None
                assert f"w.{at}" in found


@pytest.mark.parametrize(("storage", "family"), [(INT4, "kimi_k2"), (FP4, "deepseek_v3")])
def test_widths_are_whole_groups(storage: Storage, family: str, tiny: Tiny, tmp_path: Path) -> None:
    """The public package packs nothing else."""
    keys = {"hidden_size": 96, "moe_intermediate_size": 64}
    model = tiny(family, keys=keys, storage=storage)
    shutil.copy(model / "model.safetensors", tmp_path)
    config = json.loads((model / "config.json").read_text()) | {"moe_intermediate_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint is not None
    wrong = balance(checkpoint, read_model(tmp_path)).wrong
    assert any("40 columns are not whole groups of 32" in each for each in wrong)
