"""SASS lint of our kernels: no instruction may read a uniform register that none before it has
written.

Triton's own assembler (ptxas 12.8) has given such code for a correct kernel of ours: descriptors of
an MMA's operands were addressed from a register that nobody had set, so the MMA read
wherever that pointed to. Nothing above the machine code shows it.

    python -m trueline.verify.machine_code [DIRECTORY]

looks at every kernel that Triton has compiled (its cache, or DIRECTORY).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(?P<name>\S+)\s*(?P<operands>[^;]*);")
UNIFORM = re.compile(r"\bUR(\d+)\b")
DESCRIPTORS = re.compile(r"gdesc\[UR(\d+)\]")
PREDICATE = re.compile(r"U?PT|U?P\d+")
FROM_REGISTERS = re.compile(r"R\d+, R\d+, gdesc")


def unset_reads(listing: str) -> list[str]:
    """Instructions of a disassembled kernel, in the order they stand in, that read a uniform
    register before any has written it."""
    written: set[int] = set()
    found = []
    for match in INSTRUCTION.finditer(listing):
        name, operands = match["name"], match["operands"].strip()
        target, _, sources = operands.partition(",")
        if PREDICATE.fullmatch(target) and "SETP" not in name:  # also written: what comes next
            target, _, sources = sources.partition(",")
        writes = UNIFORM.fullmatch(target.strip())  # addresses stand in brackets
        reads = set(_reads(operands if writes is None else sources))
        if not reads <= written:
            found.append(f"{name} {operands}")
            written |= reads
        if writes is not None:
            first = int(writes[1])
            written |= set(range(first, first + _width(name)))
    return found


def _width(name: str) -> int:
    return 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1


def _reads(operands: str) -> Iterator[int]:
    descriptors = DESCRIPTORS.search(operands)
    if descriptors is None:
        yield from (int(number) for number in UNIFORM.findall(operands))
        return
    # Two registers for each operand of an MMA; the first may lie in ordinary ones.
    first = int(descriptors[1])
    yield from range(first + (2 if FROM_REGISTERS.match(operands) else 0), first + 4)


def disassembled(kernel: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    done = subprocess.run([tool, "-c", kernel], capture_output=True, text=True, check=True)
    return done.stdout


def main(directory: Path) -> int:
    kernels = sorted(directory.rglob("*.cubin"))
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda kernel: unset_reads(disassembled(kernel)), kernels))
    bad = [(kernel, reads) for kernel, reads in zip(kernels, found, strict=True) if reads]
    for kernel, reads in bad:
        print(f"{kernel.parent.name}/{kernel.name}: reads what nobody has written: {reads[0]}")
    print(f"{len(kernels)} compiled kernels, {len(bad)} that read an unset register")
    return 1 if bad or not kernels else 0


def cache() -> Path:
    """Where Triton keeps what it has compiled."""
    import triton

    return Path(triton.knobs.cache.dir)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else cache()))
