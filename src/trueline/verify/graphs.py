"""Captured decode steps against eager ones. Where there is no GPU, a step is run again instead of
being replayed, over the same fixed buffers and with the same padding, its kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.batch import Batch
from trueline.engine.core import EngineCore
from trueline.engine.drafts import Drafter
from trueline.engine.executor import LocalExecutor, local_runner
from trueline.engine.graphs import GraphKey, GraphOutputs
from trueline.engine.loading import load_engine
from trueline.engine.runner import Runner, build_decoder
from trueline.models import read_model
from trueline.ops.mla_decode.launch_plan import launch
from trueline.ops.registry import OPS
from trueline.ops.sampling.rows import SamplingState
from trueline.plan.plan import make_plan
from trueline.verify.cases import Subject
from trueline.verify.engine import Ask, EngineRun, run, same, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.masked import masked_prefill
from trueline.verify.ops import attended
from trueline.verify.ops.attention import SCALE, TILINGS, same_attention
from trueline.verify.ops.data import L, R, paged, randn
from trueline.verify.schedules import base, prompt
from trueline.weights.load import StoredWeights

OVER_TABLES = (
    *("mla_decode", "lightning", "index_scores", "topk", "sparse_mla"),
    *("compress", "sink_attention"),
    "sampling",
)
"""Ops that must do without the host's knowledge of lengths, slots and parameters."""
HEADS = (1, 2, 4, 8, 15, 16, 20, 64, 128)
# Batches of several sizes, some of them padded; a request that ends early moves the others' rows.
ASKS = [
    Ask(prompt(9), 8),
    Ask(prompt(17), 3, arrives=1),
    Ask(prompt(5), 6, arrives=1, params={"temperature": 0.8, "seed": 3}),
    Ask(prompt(30), 5, arrives=1),
    Ask(prompt(1), 6, arrives=1),
]


# Of those, requests whose answers end a block or more: the next turn of a chat finds them cached.
CHATS = (0, 2, 4)


def graph_is_eager(subject: Subject) -> None:
    """The same tokens and logits, with NaN in all that nobody owns; and what padded rows make of it
    is finite, so that they have read none of it. Whatever captured steps leave (cache rows, index
    keys, states, snapshots) is read by the next turn of a chat, which equals a cold one."""
    config = replace(base(subject), block_size=5, poison=True, canary_interval=1)

    def turns(done: EngineRun) -> list[Ask]:
        return [Ask([*ASKS[i].prompt, *done.tokens[i], 7, 9], 1) for i in CHATS]

    seen = two_turns("graph = eager", subject, config, ASKS, turns)
    sizes = {(step.key.size, step.rows) for step in seen.steps}
    if len({size for size, _ in sizes}) < 3 or not any(size > rows for size, rows in sizes):
        raise CheckFailed(f"graph = eager: only {sorted(sizes)} (size, rows) were seen")
    if not _answers_are_cached(seen):
        cached = seen.second.cached
        raise CheckFailed(f"graph = eager: second turns found only {cached} tokens cached")


def any_heads(subject: Subject) -> None:
    """Decode attention with as many heads as a rank may have, over contexts of many parts."""
    with find_device("auto").torch:
        for heads in HEADS:
            heads_are_padded(heads)


def heads_are_padded(heads: int) -> None:
    """A row that takes all the entries and partials there are; short ones, or empty; and as many as
    there are groups, which are not split."""
    from trueline.ops.mla_decode import triton as decode  # Triton is not everywhere

    for lengths in ([200], [70, 0, 7], [80, 70, 75, 0, 80, 79]):
        view, rows = paged(lengths, 16)
        q = randn(len(lengths), heads, L + R, seed=heads)
        exact = attended.decode(q, view, rows, SCALE)
        usual = launch(heads, view.layout, q.dtype, 132, len(lengths), max(lengths))
        plan = replace(usual, groups=5)  # so few that one row fills them all
        prepared = decode.prepare(rows, view, TILINGS[0], heads, plan=plan)
        ours = decode.run(q, view, prepared, softmax_scale=SCALE)
        same_attention(f"any heads: {heads}, contexts {lengths}", ours, exact, q.dtype)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    key: GraphKey
    positions: list[int]

    @property
    def rows(self) -> int:
        return len(self.positions) // self.key.tokens_per_row


@dataclass(frozen=True, slots=True)
class TwoTurns:
    first: EngineRun
    second: EngineRun
    steps: list[CapturedStep]


def two_turns(
    what: str,
    subject: Subject,
    config: EngineConfig,
    asks: Sequence[Ask],
    turns: Callable[[EngineRun], list[Ask]],
) -> TwoTurns:
    """On one engine that captures; both equal eager ones, the second without what was cached."""
    eager = run(subject.model, asks, config, enforce_eager=True)
    again = turns(eager)
    config = replace(config, overlap=True)
    on_gpu = find_device(config.device).is_gpu
    core = load_engine(subject.model, config).core if on_gpu else emulated(subject, config)
    steps = watch(core)
    try:
        seen = TwoTurns(serve(core, asks), serve(core, again), steps)
    finally:
        core.close()
    same(what, seen.first, eager)
    cold = run(subject.model, again, config, enforce_eager=True, enable_prefix_caching=False)
    same(f"{what}, second turn", seen.second, cold)
    return seen


def _answers_are_cached(seen: TwoTurns) -> bool:
    """Each that ends a block, and there are some."""
    block = seen.first.core.blocks.lcm_block_size
    ends = {
        i: (len(ASKS[i].prompt) + len(seen.first.tokens[i]) - 1) // block * block
        > len(ASKS[i].prompt)
        for i in CHATS
    }
    found = zip(CHATS, seen.second.cached, strict=True)
    return any(ends.values()) and all(
        cached > len(ASKS[i].prompt) or not ends[i] for i, cached in found
    )


def emulated(subject: Subject, config: EngineConfig, drafter: Drafter | None = None) -> EngineCore:
    """On a CPU: Triton's kernels for what reads the fixed buffers, and steps that are run again."""
    drafts = drafter.num_tokens if drafter else 0
    ours = {op: "triton" for op, names in OPS.items() if "triton" in names and op in OVER_TABLES}
    spec = read_model(subject.model, config.facts)
    needed = {op for op in ours if op in make_plan(spec, config, find_device("cpu")).selections}
    config = replace(config, ops={op: ours[op] for op in needed})
    plan = make_plan(spec, config, find_device("cpu"), num_draft_tokens=drafts)
    values = StoredWeights(subject.model, spec, dtype=plan.weight_dtype)
    runner = Runner(spec, plan, build_decoder(spec, plan, values), capture=again)
    assert runner.graphs is not None
    runner.graphs.capture_all()
    executor = LocalExecutor(runner, threaded=plan.limits.overlap)
    return EngineCore(executor, plan, config, drafter=drafter)


def again(step: Callable[[], object]) -> Callable[[], object]:
    step()  # as a capture runs it, with whatever is in the buffers
    return step


def watch(core: EngineCore) -> list[CapturedStep]:
    """Notes every step that is replayed, and looks at its padding."""
    graphs = local_runner(core.executor).graphs
    assert graphs is not None
    plain, seen = graphs.run, list[CapturedStep]()

    def watched_run(
        batch: Batch, states: Sequence[SamplingState], places: Mapping[int, int]
    ) -> GraphOutputs:
        made = plain(batch, states, places)
        seen.append(CapturedStep(made.key, list(batch.positions)))
        padded = graphs.padded_hidden(made.key)[len(made.tokens) :]
        if not bool(padded.isfinite().all()):
            raise CheckFailed("graph = eager: padded rows have read what nobody owns")
        return made

    graphs.run = watched_run  # type: ignore[method-assign]
    return seen


GPU_CHECKS: dict[str, Callable[[Subject], None]] = {
    "any heads": any_heads,
    "graph = eager": graph_is_eager,
    "masked prefill": masked_prefill,
}
"""Of what only a GPU has."""
