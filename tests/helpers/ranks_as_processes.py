"""`make test-ranks`: ranks = one over real processes. For each size one group of processes, started
by torchrun, loads model after model: few cases that show every pair of family, stored format, size,
division of the experts, mode and schedule. `--size N …` runs some sizes, `--list` only prints the
cases."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

import rank_grid
from families import RUNNABLE
from spread import pairwise
from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.tiny.configs import as_saved, change_config, family_config
from trueline.tiny.make import TinyOptions, make_checkpoint
from trueline.utils.environment import launcher_settings
from trueline.utils.json_types import JSON
from trueline.verify.engine import Ask, EngineRun, oracle, run, same, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.schedules import prompt

BOTH = (False, True)
CONFIG = EngineConfig(
    device="cpu", dtype="float32", max_model_len=96, max_num_seqs=4, num_gpu_blocks_override=40,
    block_size=8, overlap=False, max_logprobs=-1, init_timeout=60.0,
)  # fmt: skip
SEEDED: JSON = {"temperature": 0.9, "seed": 3, "logprobs": -1, "prompt_logprobs": -1}


@dataclass(frozen=True)
class Schedule:
    asks: tuple[Ask, ...]
    changes: JSON
    cached: bool = False
    preempted: bool = False


SCHEDULES = {
    "prefill and decode": Schedule((Ask(prompt(30), 4),), {}),
    "mixed, chunked": Schedule(
        (Ask(prompt(40), 5), Ask(prompt(7), 5, arrives=1), Ask(prompt(1), 3, arrives=2)),
        {"max_num_batched_tokens": 12, "block_size": 5},
    ),
    "prefix hit": Schedule(
        (Ask([*prompt(32, 7), 1, 2], 3), Ask([*prompt(32, 7), 4], 3, arrives=6)),
        {"snapshot_spacing": 16},
        cached=True,
    ),
    "preemption": Schedule(
        tuple(Ask(prompt(30, i), 30) for i in range(4)),
        {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 64},
        preempted=True,
    ),
    "overlap, seeds, logprobs": Schedule(
        (Ask(prompt(20), 4, params=SEEDED), Ask(prompt(5), 4, arrives=1, params=SEEDED)),
        {"overlap": True},
    ),
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    stored: str
    size: int
    whole_experts: bool
    batch_invariant: bool
    schedule: str
    heads: int = 8
    model: str = ""

    def __str__(self) -> str:
        experts = "whole" if self.whole_experts else "by width"
        bits = "bitwise" if self.batch_invariant else "in the band"
        return (
            f"{self.size} ranks, {self.family} with {self.heads} heads, {self.stored}, experts "
            f"{experts}, {self.schedule}, {bits}"
        )


def cases() -> list[Case]:
    axes = (RUNNABLE, rank_grid.STORED, rank_grid.SIZES, BOTH, BOTH, SCHEDULES)
    shown = [each.values for each in pairwise(*axes) if not each.marks]
    names = ("family", "stored", "size", "whole_experts", "batch_invariant", "schedule")
    grid = [Case(**dict(zip(names, values, strict=True))) for values in shown]
    # as it is deployed: published names in a nested config, 8 of 64 heads on each of 8 ranks
    kimi = [
        Case(family="kimi_k25", stored="plain", size=8, whole_experts=whole, batch_invariant=bits,
             schedule="mixed, chunked", heads=64)
        for whole in BOTH for bits in BOTH
    ]  # fmt: skip
    return grid + kimi


# -- one rank, under torchrun --------------------------------------------------------------


def run_rank(file: Path) -> int:
    """Every rank runs all cases; rank 0 compares with one rank and prints."""
    first = launcher_settings()["RANK"] == "0"
    torch.set_num_threads(1)
    failed = 0
    for case in msgspec.json.decode(file.read_bytes(), type=list[Case]):
        schedule, config = SCHEDULES[case.schedule], config_of(case)
        ranks = replace(
            config,
            tensor_parallel_size=case.size,
            enable_expert_parallel=case.whole_experts,
            distributed_executor_backend="external_launcher",
        )
        core = load_engine(Path(case.model), ranks).core
        done = serve(core, schedule.asks)
        core.close()
        if first:
            failed += not compared(case, done, run(Path(case.model), schedule.asks, config))
    return 1 if failed else 0


def config_of(case: Case) -> EngineConfig:
    changes = SCHEDULES[case.schedule].changes
    return replace(CONFIG, batch_invariant=case.batch_invariant, **changes)


def compared(case: Case, done: EngineRun, one: EngineRun) -> bool:
    schedule = SCHEDULES[case.schedule]
    try:
        if [rows.keys() for rows in done.logits] != [rows.keys() for rows in one.logits]:
            raise CheckFailed("other positions were computed")
        if schedule.cached and not any(done.cached):
            raise CheckFailed("nothing was found in the prefix cache")
        if schedule.preempted and not done.core.scheduler.counters.num_preemptions:
            raise CheckFailed("nothing was preempted")
        worst = same("ranks = one", done, one, bitwise=case.batch_invariant)
        if case.batch_invariant and reported(done) != reported(one):
            raise CheckFailed("reported logprobs differ")
        exact = oracle(Path(case.model), schedule.asks, done) if case.stored == "plain" else None
    except CheckFailed as error:
        print(f"FAILED {case}: {error}", flush=True)
        return False
    beside = "" if exact is None else f", {exact:.1e} from the reference"
    print(f"ok {case}: {worst:.1e} from one rank{beside}", flush=True)
    return True


def reported(done: EngineRun) -> list[list[Any]]:
    return [
        [(score.token_id, score.top) for output in each for score in
         (*output.prompt_scores, *output.scores)]
        for each in done.outputs
    ]  # fmt: skip


# -- all of them ---------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, nargs="*", default=rank_grid.SIZES)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank:
        return run_rank(given.rank)
    chosen = [case for case in cases() if case.size in given.size]
    if given.list:
        print("\n".join(map(str, chosen)))
        return 0
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        made = _Models(Path(directory))
        for size in given.size:
            mine = [case for case in chosen if case.size == size]
            file = Path(directory) / f"{size}.json"
            file.write_bytes(
                msgspec.json.encode([msgspec.structs.replace(c, model=made(c)) for c in mine])
            )
            if _run_group(size, file):
                failed.append(str(size))
    print(f"{len(chosen)} cases", "all right" if not failed else f"wrong at {', '.join(failed)}")
    return 1 if failed else 0


def _run_group(size: int, file: Path) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(size), __file__, "--rank", str(file)]  # fmt: skip
    return subprocess.run(command).returncode


class _Models:
    """Each made once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[str, Path] = {}

    def __call__(self, case: Case) -> str:
        return str(rank_grid.make(self._tiny, case.family, case.stored,
                                  num_attention_heads=case.heads))  # fmt: skip

    def _tiny(self, family: str, *, keys: JSON, storage: Any, fused_experts: bool) -> Path:
        name = json.dumps([family, keys, repr(storage), fused_experts])
        if name not in self._made:
            config = family_config(family)
            change_config(config, {**keys, "torch_dtype": "float32"}, storage=storage)
            if family == "deepseek_v4":  # entries for 4 and 8 tokens: requests here have few blocks
                config = as_saved(config, 4, 8)
            where = self._directory / str(len(self._made)) / family
            options = TinyOptions(dtype="float32", fused_experts=fused_experts)
            make_checkpoint(where, config, options)
            self._made[name] = where
        return self._made[name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
