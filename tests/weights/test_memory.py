"""Peak host memory at load: the loaded model and little more, measured in a fresh process."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paths import CONFIGS
from trueline import native
from trueline.cli import main
from trueline.models import read_model
from trueline.ops.codes import codes_of
from trueline.ops.linear import native as linear
from trueline.tiny.quantise import published_storage
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.dummy import draw_stored
from trueline.weights.formats import Stored
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.load import load_weights
from trueline.weights.value import StoredPart, Weight

Tiny = Callable[..., Path]
MB = 1_000_000

LOAD = """
import sys, torch
from pathlib import Path
from trueline.models import read_model
from trueline.weights.load import load_weights

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

torch.zeros(1000, 1000) @ torch.zeros(1000, 1000)  # what torch allocates once
before = status("VmRSS")
directory = Path(sys.argv[1])
values = load_weights(directory, read_model(directory), dtype=getattr(torch, sys.argv[2]))
loaded = sum(value.nbytes for value in values.values())
print(status("VmHWM") - before, loaded)
"""


def measure(model: Path, dtype: str) -> tuple[int, int]:
    """(growth of the process at its highest, bytes of the loaded model)."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(model), dtype], capture_output=True, text=True, check=True
    )
    peak, loaded = map(int, done.stdout.split())
    return peak, loaded


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc to measure memory"
)
WIDE = {
    "hidden_size": 1020,
    "intermediate_size": 2000,
    "moe_intermediate_size": 500,
    "num_hidden_layers": 5,
}


@needs_proc
@pytest.mark.parametrize(
    "stored", [*(pytest.param(s, marks=pytest.mark.slow) for s in ("float32", "bfloat16")), "fp8"]
)
def test_peak_is_the_model_and_little_more(stored: str, tiny: Tiny) -> None:
    fp8 = BlockFp8(block=(128, 128), power_of_two_scales=False, ignored_modules=())
    model = tiny(
        "deepseek_v3",
        keys=WIDE,
        dtype="bfloat16" if stored == "fp8" else stored,
        storage=fp8 if stored == "fp8" else None,
    )
    peak, loaded = measure(model, "float32")
    assert loaded > 300 * MB
    assert peak < loaded + 80 * MB, f"{peak / MB:.0f} MB for {loaded / MB:.0f} MB"


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="pages cannot be given back")
@pytest.mark.parametrize("name", ["block-fp8", "int4", "fp4"])
def test_every_tensor_of_a_weight_is_given_back(
    name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales too: those of int4 are a ninth of a checkpoint, and nobody reads them again."""
    keys = {"hidden_size": 1024, "moe_intermediate_size": 256}
    model = tiny("deepseek_v3", keys=keys, dtype="bfloat16", storage=published_storage(name))
    given_back: set[tuple[int, ...]] = set()

    class Map(mmap.mmap):
        def madvise(self, option: int, *pages: int) -> None:
            if option == mmap.MADV_DONTNEED:
                given_back.add(pages)

    monkeypatch.setattr(mmap, "mmap", Map)
    load_weights(model, read_model(model), dtype=torch.bfloat16)
    checkpoint = open_checkpoint(model)
    assert checkpoint is not None
    page = mmap.PAGESIZE
    inside = {
        tensor.name: (-(-tensor.begin // page) * page, tensor.end // page * page)
        for tensor in checkpoint.tensors.values()
    }
    whole = {tensor: (low, high - low) for tensor, (low, high) in inside.items() if low < high}
    assert any("scale" in tensor for tensor in whole) == (name != "block-fp8")
    assert [tensor for tensor, pages in whole.items() if pages not in given_back] == []


def packed_natively(weight: Weight) -> list[Tensor]:
    if reason := native.unavailable():
        pytest.skip(reason)
    return [linear.run(torch.eye(weight.shape[1]), linear.pack(weight))]


def dequantised(weight: Weight) -> list[Tensor]:
    return [weight.dequantise()]


def as_codes(weight: Weight) -> list[Tensor]:
    codes = codes_of(weight)
    return [codes.numbers, codes.scales]


@pytest.mark.parametrize("name", ["block-fp8", "int4", "fp4"])
@pytest.mark.parametrize(
    "pack", [packed_natively, as_codes, dequantised], ids=lambda function: function.__name__
)
def test_nothing_is_read_after_it_was_given_back(
    name: str, pack: Callable[[Weight], list[Tensor]]
) -> None:
    """Pages that are read again stay in memory until all is loaded."""
    fmt = published_storage(name).formats[0]

    def drawn() -> Stored:
        generator = torch.Generator().manual_seed(0)
        return draw_stored(fmt, (256, 128), torch.bfloat16, generator)

    def weight(stored: Stored, read: Callable[[], None] | None) -> Weight:
        part = StoredPart(stored, fmt.label, (0, 0), read)
        return Weight((256, 128), torch.bfloat16, (part,))

    given_back = drawn()

    def forget() -> None:
        for each in gc.get_referents(given_back):
            if isinstance(each, Tensor):
                each.view(torch.uint8).fill_(1)

    wanted = pack(weight(drawn(), None))
    for mine, theirs in zip(pack(weight(given_back, forget)), wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(given_back.dequantise(), drawn().dequantise())


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    "stored",
    [
        ("--dtype", "float32"),
        ("--dtype", "bfloat16"),
        ("--dtype", "bfloat16", "--format", "block-fp8"),
        ("--dtype", "bfloat16", "--format", "int4"),
        ("--dtype", "bfloat16", "--format", "fp4"),
    ],
    ids=lambda options: options[-1],
)
def test_peak_of_the_benchmark_model(stored: tuple[str, ...], tmp_path: Path) -> None:
    """`bench/configs/mid`, 1.56 GB in float32: a second copy would not fit under the bound."""
    config = CONFIGS / "mid" / "config.json"
    with pytest.raises(SystemExit):
        main(["make-tiny", "config", str(tmp_path / "mid"), "--config", str(config),
              *stored, "--shard-mb", "500"])  # fmt: skip
    peak, loaded = measure(tmp_path / "mid", "float32")
    assert loaded > 1500 * MB
    assert peak < loaded + (1 << 30), f"{peak / MB:.0f} MB for {loaded / MB:.0f} MB"
    assert peak < loaded + 300 * MB, f"{peak / MB:.0f} MB for {loaded / MB:.0f} MB"
