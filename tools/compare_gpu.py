"""Two revisions on one GPU, measured alternately: machines of one kind differ by several percent.

    git archive REVISION src bench | tar x -C .before    # bench/ where the revision has it
    tools/gpu.sh run python3 tools/compare_gpu.py .before [MODEL...]

Prints the median of every decode and prefill cell before and after, and their ratio; --out FILE
keeps all runs as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parents[1]
MODELS = ("v2lite", "ling25s", "v32s")
Cells = dict[tuple[str, ...], list[float]]


def run(tree: Path, model: str) -> dict[str, Any]:
    """All cells of a model, in a process of its own."""
    if (tree / "src/trueline/bench").is_dir():
        command = ["-m", "trueline.bench.gpu.end_to_end", model]
    else:  # before the benchmarks had one home
        command = ["-m", "trueline.benchmark_gpu.end_to_end", model, str(tree / "bench")]
    paths = [str(tree / "src"), str(HERE / ".gpu_site")]
    done = subprocess.run(
        [sys.executable, *command, repr(time.time())],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def gather(cells: Cells, found: dict[str, Any]) -> None:
    for what in ("decode", "prefill"):
        for cell in found[what]:
            name = f"{found['model']} {what} B={cell['B']} {cell['inp']}"
            for figure in ("step_us", "ms_step", "tok_s"):
                if cell.get(figure) is not None:
                    cells.setdefault((name, figure), []).append(cell[figure])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides: dict[str, Cells] = {"before": {}, "after": {}}
    trees = {"before": options.before.resolve(), "after": HERE}
    runs = []
    for number in range(options.rounds):
        for model in options.models:
            # in turn, and the other way round the next time
            for side in ("before", "after") if number % 2 == 0 else ("after", "before"):
                found = run(trees[side], model)
                runs.append({"side": side, "round": number} | found)
                gather(sides[side], found)
                if options.out:
                    options.out.write_text(json.dumps(runs, indent=1))
    for cell, before in sides["before"].items():
        after = sides["after"].get(cell, [])
        if after:
            a, b = median(before), median(after)
            print(f"{' '.join(cell):<44} {a:12.2f} {b:12.2f} {b / a:7.3f}")


if __name__ == "__main__":
    main()
