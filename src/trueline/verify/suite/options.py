"""What a run of the checks makes of the engine's options: all of its engines have them, or the
reader is told which do not and why, or the run is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from trueline.config import EngineConfig
from trueline.errors import UsageError
from trueline.verify.failed import CheckFailed
from trueline.verify.suite.effects import not_applied, stated
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.outcome import Outcome, Todo
from trueline.verify.suite.session import Session
from trueline.verify.suite.stored_as import require_stored_as_asked

APPLIED = frozenset({
    *("dtype", "device", "seed", "max_num_seqs", "max_num_batched_tokens", "block_size"),
    *("enable_prefix_caching", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
    *("mamba_cache_dtype", "num_state_slots", "snapshot_spacing", "kv_cache_dtype"),
    *("kv_cache_group_size", "kv_cache_scale_fmt", "index_cache_dtype", "index_cache_layout"),
    *("numerics", "batch_invariant", "overlap", "max_logprobs", "tensor_parallel_size"),
    *("enable_expert_parallel", "distributed_executor_backend", "data_parallel_size"),
    *("data_parallel_rank", "pipeline_parallel_size", "decode_context_parallel_size"),
    *("prefill_context_parallel_size", "master_addr", "master_port", "init_timeout"),
    *("engine_timeout", "debug_collectives", "ops", "layers", "facts", "poison"),
    *("canary_interval", "canary_report_dir", "speculative_config"),
})  # fmt: skip
"""Every engine of the checks has them as they were given, but where a composition is about that
option."""

OWN: Mapping[str, str] = {
    "max_model_len": "no longer than the definition can hold here",
    "gpu_memory_utilization": "the checks' caches have the blocks that their requests need",
    "enforce_eager": "eager steps are watched, and captured ones compared with them",
}
"""The checks have values of their own, and why."""

REFUSED: Mapping[str, tuple[Callable[[EngineConfig], bool], str]] = {
    "load_format": (
        lambda config: config.load_format == "dummy",
        "drawn weights are nowhere that the definition could read them; trueline make-tiny writes "
        "a model with drawn weights",
    ),
    "nnodes": (
        lambda config: config.nnodes > 1,
        "every composition starts its ranks, and those of other machines would have to be started "
        "each time; accepted: the ranks of one machine",
    ),
    "node_rank": (lambda config: config.node_rank > 0, "the checks run on machine 0"),
    "distributed_executor_backend": (
        lambda config: config.backend == "external_launcher",
        "torchrun starts ranks once, and every composition has its own; accepted: mp, which "
        "computes the same",
    ),
}
"""What is not covered, and why."""


def require_covered(config: EngineConfig) -> None:
    for name, (refused, why) in REFUSED.items():
        if refused(config):
            value = config.backend if name.endswith("backend") else getattr(config, name)
            raise UsageError(f"{name} = {value!r}: trueline verify does not cover it: {why}")


def given_options(config: EngineConfig) -> list[str]:
    """Those that are not the defaults."""
    default = EngineConfig()
    names = (item.name for item in fields(config))
    return [name for name in names if getattr(config, name) != getattr(default, name)]


def checks(session: Session) -> Iterator[Todo]:
    """After all others: of the engines that have run."""
    yield Todo(
        "options/engines",
        "as asked",
        "the engines that have run here had the options that were given",
        lambda: _options(session),
    )
    yield Todo(
        "options/plan",
        "as asked",
        "what the plan of the user's engine states of the options that were given",
        lambda: _planned(session),
    )
    if session.config.data_parallel_size > 1:
        yield Todo(
            "options/other replicas",
            "as asked",
            "replicas of the model other than the one that is checked",
            lambda: _replicas(session),
        )


def _options(session: Session) -> Outcome:
    given = given_options(session.config)
    if not session.started:
        raise NotForced("no engine has run")
    told = []
    for name in given:
        if name in OWN:
            found = {str(getattr(each.config, name)) for each in session.started}
            told.append(f"{name}: {OWN[name]} ({', '.join(sorted(found))})")
            continue
        wanted = getattr(session.config, name)
        others = [each for each in session.started if getattr(each.config, name) != wanted]
        if wrong := [each for each in others if name not in each.changes]:
            raise CheckFailed(
                f"{name} = {wanted!r} was given, and an engine has run with "
                f"{getattr(wrong[0].config, name)!r}"
            )
        same = len(session.started) - len(others)
        told.append(f"{name} = {wanted}: {same} of {len(session.started)} engines")
    for each in session.started:
        require_stored_as_asked(each.plan, each.config)
    return Outcome("; ".join(told) or f"defaults: {len(session.started)} engines")


def _planned(session: Session) -> Outcome:
    given = given_options(session.config)
    if wrong := not_applied(session.config, given, session.plan):
        raise CheckFailed("; ".join(wrong))
    require_stored_as_asked(session.plan, session.config)
    seen = sorted(set(given) & stated(session.plan).keys())
    return Outcome(", ".join(seen) or "none was given that a plan states")


def _replicas(session: Session) -> Outcome:
    config = session.config
    raise NotForced(
        f"data_parallel_size = {config.data_parallel_size}: what ran is replica "
        f"{config.data_parallel_rank}; the others share nothing with it, and --data-parallel-rank "
        "checks them"
    )
