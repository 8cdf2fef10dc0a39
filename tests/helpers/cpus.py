"""`make test-cpus`: the numeric tests with the libraries held to other instruction sets, and the
largest error of each check as a part of what it accepts. `--write` puts the table into
docs/results/testing.md; `--only NAME …` runs some of the settings; `--list` names them and their
tests."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from margins import Margins, collected
from paths import HELPERS, RESULTS, ROOT, TESTS
from trueline.device import cpu_features

PAGE = RESULTS / "testing.md"
BEGIN, END = "<!-- make test-cpus -->\n", "<!-- /make test-cpus -->\n"
OF_OPS = ("trueline.verify.ops", "trueline.verify.bounds")
LEFT_OUT = (
    "test_gpu.py",
    "test_hopper.py",
    "test_machine_code.py",
    "test_docs.py",
    "test_server.py",
)
"""They need a GPU or compile for one, have no numbers, or those of LLM."""


@dataclass(frozen=True)
class Setting:
    """What libraries are held to. MKL obeys on Intel's CPUs only; numpy's OpenBLAS is what Triton's
    interpreter multiplies with."""

    aten: str = ""
    onednn: str = ""
    openblas: str = ""
    mkl: str = ""
    native: str = ""
    threads: int = 1
    engine: bool = False
    """Whole models too, not only ops."""
    needs: str = "fpu"

    def environment(self) -> dict[str, str]:
        held = {
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "DNNL_MAX_CPU_ISA": self.onednn,
            "OPENBLAS_CORETYPE": self.openblas,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "MKL_CBWR": "COMPATIBLE" if self.mkl == "SSE4_2" else "",
            "TRUELINE_NATIVE_TARGET": self.native,
            "TEST_THREADS": str(self.threads),
            "OPENBLAS_NUM_THREADS": str(self.threads),
        }
        return {name: value for name, value in held.items() if value}


SETTINGS = {
    "own": Setting(),
    "own, 2 threads": Setting(threads=2),
    "AVX-512": Setting(
        "avx512", "AVX512_CORE", "SkylakeX", "AVX512", "x86-64-v4", needs="avx512vl"
    ),
    "AVX2": Setting("avx2", "AVX2", "Haswell", "AVX2", "x86-64-v3", engine=True, needs="avx2"),
    "AVX2, 2 threads": Setting("avx2", "AVX2", "Zen", "AVX2", "x86-64-v3", threads=2, needs="avx2"),
    "AVX2, no kernels": Setting("avx2", "AVX2", "Zen", "AVX2", "off", needs="avx2"),
    "SSE, no kernels": Setting("default", "SSE41", "Nehalem", "SSE4_2", "off", engine=True),
}


def numeric_tests(setting: Setting) -> list[str]:
    """Whatever imports verify/ is numeric; ops' tests know its bounds or its checks of ops."""
    found = []
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text()
        wanted = OF_OPS if not setting.engine else (*OF_OPS, "trueline.verify", "import hf")
        # interpreted kernels have no threads
        threads = setting.threads == 1 or not file.name.startswith("test_triton")
        if threads and file.name not in LEFT_OUT and any(part in text for part in wanted):
            found.append(str(file) + ("::test_check_is_green" if "faults" in file.name else ""))
    return found


def run(name: str, setting: Setting, files: list[str]) -> tuple[Margins, str]:
    """The margins, and how it ended."""
    workers = max(2 // setting.threads, 1)
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | setting.environment() | {"TEST_MARGINS": directory}
        paths = [str(HELPERS), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "margins", "-p", "no:cacheprovider",
                   "-m", "not slow", "-r", "f", "-n", str(workers)]  # fmt: skip
        start = time.monotonic()
        done = subprocess.run(
            [*command, *files], cwd=ROOT, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = done.stdout.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        ended = f"{lines[-1] if lines else done.stderr[-300:]} (exit {done.returncode})"
        print(f"{name}: {ended}, {time.monotonic() - start:.0f} s", *failed, sep="\n  ", flush=True)
        return collected(Path(directory)), lines[-1].strip("= ") if lines else "did not run"


def table(found: dict[str, tuple[Margins, str]]) -> str:
    """Checks by settings: the largest error / accepted. Last, the fault that is nearest to it."""
    checks = sorted({check for margins, _ in found.values() for check in margins})
    lines = [
        "| check | " + " | ".join(found) + " | nearest fault |",
        "|---" * (len(found) + 2) + "|",
    ]
    for check in checks:
        kept = [margins.get(check) for margins, _ in found.values()]
        faults = min((each[1] for each in kept if each), default=float("inf"))
        cells = [f"{each[0]:.2f}" if each else "" for each in kept]
        factor = f"× {faults:.3g}" if faults < float("inf") else "not by size"
        lines.append(f"| {check} | {' | '.join(cells)} | {factor} |")
    ends = [f"- {name}: {ended}" for name, (_, ended) in found.items()]
    return "\n".join([*lines, "", *ends, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--files", nargs="*", help="instead of all numeric tests")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    found = {}
    for name in given.only:
        setting = SETTINGS[name]
        if given.list:
            print(name, *(Path(file).name for file in numeric_tests(setting)), sep="\n  ")
        elif setting.needs not in cpu_features().split():
            print(f"{name}: not run: this CPU has no {setting.needs}")
        else:
            found[name] = run(name, setting, given.files or numeric_tests(setting))
    if not found:
        return 0
    made = table(found)
    print(made)
    if given.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + made + "\n" + END + rest.partition(END)[2])
    return int(any("failed" in ended or "passed" not in ended for _, ended in found.values()))


if __name__ == "__main__":
    sys.exit(main())
