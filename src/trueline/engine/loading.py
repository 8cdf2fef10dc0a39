"""From a model directory to a running core, with an account of what was decided and how long it
took."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from trueline import __version__
from trueline.config import EngineConfig
from trueline.device import find_device, gpu_in_use, num_gpus, use_gpu
from trueline.engine.core import EngineCore
from trueline.engine.drafts import Drafter
from trueline.engine.executor import AnyExecutor, LocalExecutor
from trueline.engine.memory import measure
from trueline.engine.ranks.executor import LaunchedExecutor, RanksExecutor, why_it_failed
from trueline.engine.ranks.join import first_gpu, join_under_torchrun, start_ranks
from trueline.engine.ranks.processes import Workers, how_it_ended
from trueline.engine.runner import Runner, build_decoder
from trueline.errors import TruelineError, UsageError
from trueline.layers.context import Parameters
from trueline.models import read_model
from trueline.native import use_threads
from trueline.parallel.collective import Collective
from trueline.parallel.group import RankFailed, RankGroup
from trueline.parallel.stated import stated
from trueline.plan.plan import Plan, make_plan
from trueline.spec.feedforward import MoESpec
from trueline.spec.model import ModelSpec
from trueline.spec.shard import local_spec
from trueline.weights.dummy import DummyWeights
from trueline.weights.load import StoredWeights

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Loaded:
    spec: ModelSpec
    expected: Plan
    """Made before anything was loaded."""
    plan: Plan
    core: EngineCore
    seconds: dict[str, float]
    """Start-up, phase by phase."""
    ranks: list[list[str]]
    """The table of ranks, its head first; empty for one rank."""

    def lines(self) -> Iterator[str]:
        """What was decided."""
        yield from self.plan.lines()
        yield from self.plan.changes(self.expected)
        widths = [max(map(len, column)) for column in zip(*self.ranks, strict=True)]
        for row in self.ranks:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield f"ranks        {'  '.join(cells)}".rstrip()


@dataclass(frozen=True)
class LoadedRank:
    """One rank's part of the model, ready to run."""

    spec: ModelSpec
    """Of the whole model."""
    expected: Plan
    plan: Plan
    runner: Runner
    seconds: dict[str, float]
    ranks: list[list[str]]


def load_engine(
    model: Path,
    config: EngineConfig,
    progress: Progress | None = None,
    drafter: Drafter | None = None,
) -> Loaded:
    drafts = drafter.num_tokens if drafter else 0
    group: RankGroup | None = None
    processes: Workers | None = None
    if config.node_rank:
        raise UsageError(
            f"node_rank = {config.node_rank}: requests are for machine 0; here run `trueline "
            "serve` with the same options, which starts the ranks of this machine"
        )
    if config.data_parallel_size > 1 and config.data_parallel_rank is None:
        raise UsageError(
            f"data_parallel_size = {config.data_parallel_size}: one engine is one replica; "
            "`trueline serve` starts all of them behind one address, and programs that start one "
            "each say which with data_parallel_rank"
        )
    if config.backend in ("mp", "ray"):
        # what is wrong with it, or does not divide, is told before ranks are started
        _local_spec(read_model(model, config.facts), config, 0)
        group, processes = start_ranks(model, config)
    elif config.backend == "external_launcher":
        group = join_under_torchrun(config)
    elif config.data_parallel_size > 1 and config.device != "cpu" and (found := num_gpus()):
        use_gpu(first_gpu(config, found))
    try:
        if processes is not None:
            progress = _while_alive(processes, progress)
        rank = load_rank(model, config, group, progress, drafts)
    except Exception as error:
        if group is None or processes is None:
            raise
        why = why_it_failed(group, processes, error)
        others = group.reported() is not None
        group.abort()
        group.close()
        processes.close()
        if isinstance(error, TruelineError) and not others:
            raise
        raise RankFailed(why) from error
    plan = rank.plan
    local = LocalExecutor(
        rank.runner,
        threaded=plan.limits.overlap and not plan.device.is_gpu,
        on_step=group.journal.next_step if group is not None else lambda: None,
    )
    executor: AnyExecutor = local
    if group is not None and processes is not None:
        executor = RanksExecutor(local, group, processes, config.engine_timeout)
    elif group is not None:
        executor = LaunchedExecutor(local, group, config.engine_timeout)
    core = EngineCore(executor, plan, config, _fingerprint(model, plan), drafter)
    if plan.device.is_gpu:
        core.late_kernels.watch()
    return Loaded(rank.spec, rank.expected, plan, core, rank.seconds, rank.ranks)


def load_rank(
    model: Path,
    config: EngineConfig,
    group: RankGroup | None = None,
    progress: Progress | None = None,
    num_drafts: int = 0,
) -> LoadedRank:
    """This process's part of the model; `group`: the other ranks, where there are any."""
    clock = _Clock()
    spec = local = read_model(model, config.facts)
    device = find_device(config.device)
    if not device.is_gpu:
        device = device.shared_by(config.data_parallel_size)
    if group is not None:
        place = group.place
        local = _local_spec(spec, config, place.rank)
        if group.backend == "gloo":  # one CPU, or one GPU, for all ranks of this machine
            device = device.shared_by(place.local_size)
    plan = expected = make_plan(local, config, device, num_draft_tokens=num_drafts)
    if group is not None:
        group.agree(_facts(model, spec, plan, config))
        plan = expected = _smallest(plan, group)
    torch.set_num_threads(plan.threads)
    if not device.is_gpu:
        use_threads(plan.threads)
    clock.lap("plan")
    values: Parameters
    if config.load_format == "dummy":
        values = DummyWeights(
            local, dtype=plan.weight_dtype, device=plan.device.torch, seed=config.seed
        )
    else:
        values = StoredWeights(model, local, dtype=plan.weight_dtype, progress=progress)
    collective: Collective | None = None
    if group is not None:
        collective = stated(group) if config.debug_collectives else group.collective
    decoder = build_decoder(local, plan, values, collective)
    clock.lap("weights")
    if device.is_gpu:
        from trueline.engine.warmup import compile_kernels  # needs Triton

        compile_kernels(local, plan, decoder)
        clock.lap("kernels")
        measured = measure(local, plan, decoder)
        plan = make_plan(local, config, device, measured, num_draft_tokens=num_drafts)
        if group is not None:
            plan = _smallest(plan, group)
        clock.lap("measuring")
    runner = Runner(local, plan, decoder, rank=group.place.rank if group else 0)
    clock.lap("caches")
    if runner.graphs is not None:
        runner.graphs.capture_all()
        clock.lap("graphs")
    table = [] if group is None else [RANK_COLUMNS, *group.table(_rank_row(local, plan, group))]
    return LoadedRank(spec, expected, plan, runner, clock.laps, table)


def _while_alive(processes: Workers, progress: Progress | None) -> Progress:
    """Loading takes minutes, and a rank that has ended meanwhile ends it."""

    def report(done: int, total: int) -> None:
        for rank, code in processes.deaths():
            raise RankFailed(f"rank {rank} {how_it_ended(code)} while loading")
        if progress is not None:
            progress(done, total)

    return report


def _local_spec(spec: ModelSpec, config: EngineConfig, rank: int) -> ModelSpec:
    return local_spec(
        spec,
        rank,
        config.tensor_parallel_size,
        invariant_sums=config.batch_invariant,
        expert_parallel=config.enable_expert_parallel,
    )


def _smallest(plan: Plan, group: RankGroup) -> Plan:
    """As many blocks and slots as the rank with the least memory has: one scheduler hands out the
    same on all."""
    slots = [plan.slots.num_slots] if plan.slots else []
    counts = [each.num_blocks for each in plan.groups] + slots
    found = group.control.smallest(counts)
    groups = tuple(
        replace(each, num_blocks=count) for each, count in zip(plan.groups, found, strict=False)
    )
    return replace(
        plan,
        groups=groups,
        slots=replace(plan.slots, num_slots=found[-1]) if plan.slots else None,
        cache_bytes=sum(each.num_blocks * each.block_bytes for each in groups),
    )


RANK_COLUMNS = ["rank", "device", "heads", "experts", "words", "weights", "blocks"]


def _rank_row(spec: ModelSpec, plan: Plan, group: RankGroup) -> list[str]:
    device = f"cuda:{gpu_in_use()}" if plan.device.is_gpu else "cpu"
    heads = {span for layer in spec.layers if (span := getattr(layer.mixer, "heads", None))}
    moe = [each.feed_forward for each in spec.layers if isinstance(each.feed_forward, MoESpec)]
    return [
        str(group.place.rank),
        f"{socket.gethostname()} {device}",
        ", ".join(sorted(map(str, heads))),
        _experts(moe[0]) if moe else "none",
        str(spec.vocab),
        f"{plan.weight_bytes / 1e6:,.1f} MB",
        ", ".join(str(each.num_blocks) for each in plan.groups),
    ]


def _experts(moe: MoESpec) -> str:
    width = "" if moe.expert_width.is_whole else f", {moe.expert_width.count} wide"
    return f"{moe.experts}{width}"


def _facts(model: Path, spec: ModelSpec, plan: Plan, config: EngineConfig) -> dict[str, str]:
    """What must be the same on every rank. Not where the files lie, nor when they were written."""
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    chosen = {op: each.name for op, each in plan.selections.items()}
    stored = {form: {op: s.name for op, s in ops.items()} for form, ops in plan.by_format.items()}
    own = {"node_rank", "master_addr"}
    options = {item.name: getattr(config, item.name) for item in fields(config)}
    return {
        "the version of trueline": __version__,
        "the version of torch": torch.__version__,
        "the model's config": _digest(repr(spec)),
        "the checkpoint's files": _digest(repr([(f.name, f.stat().st_size) for f in files])),
        "the engine's options": repr({k: v for k, v in sorted(options.items()) if k not in own}),
        "the dtype": f"{plan.compute_dtype}, weights in {plan.weight_dtype}",
        "implementations": repr((chosen, stored, plan.numerics.name)),
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _fingerprint(model: Path, plan: Plan) -> str:
    """What a cached token depends on besides the tokens before it."""
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    kept = (plan.compute_dtype, plan.numerics.name, plan.kinds, plan.slots)
    text = repr((str(model.resolve()), stats, kept))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
