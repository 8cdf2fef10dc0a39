"""An engine without a server, in a process of its own: a line of JSON in, a line of figures out.
Between lines it is idle."""

from __future__ import annotations

import json
import sys

from trueline.bench.workload import bench_engine, timed


def main(model: str, options: str) -> None:
    engine = bench_engine(model, **json.loads(options))
    print("ready", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        figures = timed(engine, work["prompts"], work["output_len"])
        print(json.dumps(figures.as_json()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
