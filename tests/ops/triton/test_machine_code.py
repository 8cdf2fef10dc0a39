"""Compiled for a Hopper GPU, on any machine: the kernel that the assembler got wrong is told from
those that we launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trueline.verify.machine_code import main, unset_reads

COMPILE = """
import sys
from pathlib import Path
import trueline.device
trueline.device.supports_pdl = lambda: True  # as on that GPU
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trueline.ops.lightning.kernels import walk

def compiled(values, stages, known):
    constants = dict(DK=64, DV=64, BK=64, BV=values, CHUNK=64, OUTPUT=True, FROM_SLOT=True,
                     EXACT=True)
    kinds = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"scale": "fp32"}
    kinds |= dict.fromkeys(("state", "sums", "slopes"), "*fp32")
    lists = ("walks", "followed", "sources", "firsts", "stops", "slots")
    kinds |= dict.fromkeys(lists, "*i32") | dict.fromkeys(constants, "constexpr")
    names = walk.made.arg_names
    whole = {"out", "state", "sums", "slopes", "slot_size"}
    whole |= {n for n in names if n in "qkv" and known}
    whole |= {n for n in names if n.endswith(("_row", "_head")) and known == "all"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in whole}
    source = ASTSource(walk.made, {n: kinds.get(n, "i32") for n in names}, constants, attributes)
    options = {"num_warps": 4, "num_stages": stages, "launch_pdl": True}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]

to = Path(sys.argv[1])
for name, *how in (("narrow", 16, 3, ""), ("pointers", 16, 3, "pointers"), ("ahead", 16, 3, "all"),
                   ("wide", 64, 2, "")):
    (to / name).mkdir()
    (to / name / "walk.cubin").write_bytes(compiled(*how))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a process of its own: the tests' interprets kernels."""
    to = tmp_path_factory.mktemp("kernels")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(to / "cache")
    subprocess.run([sys.executable, "-c", COMPILE, str(to)], check=True, env=env)
    return to


@pytest.mark.parametrize("name", ["narrow", "pointers"])
def test_what_the_assembler_got_wrong_is_seen(
    kernels: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a later assembler gets it right, `prefill_launch` may launch narrow programs always. That
    only pointers are known to be multiples of 16, as with rows of 264 numbers, is not enough."""
    assert main(kernels / name) == 1
    assert f"{name}/walk.cubin: reads what nobody has written: UIADD3 UR" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ahead", "wide"])
def test_what_we_launch_is_right(kernels: Path, name: str) -> None:
    assert main(kernels / name) == 0


def test_nothing_compiled_is_no_proof(tmp_path: Path) -> None:
    assert main(tmp_path) == 1


LISTING = """
        /*0060*/                   S2UR UR5, SR_CTAID.X ;
        /*0070*/                   ULDC.64 UR8, c[0x0][0x260] ;
        /*0080*/              @!P0 REDUX.SUM.S32 UR6, R4 ;
        /*0090*/                   UIADD3 UR7, UP0, UR5, 0x20, URZ ;
        /*0098*/                   ULOP3.LUT UP1, UR10, UR5, 0x1, URZ, 0xc0, !UPT ;
        /*00a0*/                   IMAD R3, R2, UR9, R1 ;
        /*00b0*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR{first}].tnspB, RZ, !UPT ;
        /*00c0*/                   HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR{second}], R24 ;
"""


@pytest.mark.parametrize(
    ("first", "second", "unset"),
    [(5, 5, 0), (5, 4, 0), (7, 6, 0), (4, 4, 1), (8, 6, 1), (6, 8, 1), (20, 30, 2)],
)
def test_registers_of_factors(first: int, second: int, unset: int) -> None:
    """5 to 10 are set."""
    assert len(unset_reads(LISTING.format(first=first, second=second))) == unset
