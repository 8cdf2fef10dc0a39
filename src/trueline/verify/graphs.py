"""Captured decode steps against eager ones. Where there is no GPU, a step is run again instead of
being replayed, over the same fixed buffers and with the same padding, its kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.batch import Batch
from trueline.engine.core import EngineCore
from trueline.engine.drafts import Drafter
from trueline.engine.executor import LocalExecutor, local_runner
from trueline.engine.graphs import DecodeGraphs, GraphKey, GraphOutputs
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
    config = replace(base(subject), block_size=5, poison=True)
    eager = run(subject.model, ASKS, config, enforce_eager=True)
    first, second, turns = captured(subject, replace(config, overlap=True))
    same("graph = eager", first, eager)
    cold = run(subject.model, turns, config, enforce_eager=True, enable_prefix_caching=False)
    same("graph = eager, second turn", second, cold)


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


def captured(subject: Subject, config: EngineConfig) -> tuple[EngineRun, EngineRun, list[Ask]]:
    """Two turns on one engine, and what the second asked."""
    on_gpu = find_device(config.device).is_gpu
    core = load_engine(subject.model, config).core if on_gpu else emulated(subject, config)
    graphs = local_runner(core.executor).graphs
    assert graphs is not None
    seen: set[tuple[GraphKey, int]] = set()
    graphs.run = watched(graphs, seen)  # type: ignore[method-assign]
    try:
        done = serve(core, ASKS)
        turns = [Ask([*ASKS[i].prompt, *done.tokens[i], 7, 9], 1) for i in CHATS]
        again = serve(core, turns)
    finally:
        core.close()
    sizes = {(key.size, rows) for key, rows in seen}
    if len({size for size, _ in sizes}) < 3 or not any(size > rows for size, rows in sizes):
        raise CheckFailed(f"graph = eager: only {sorted(sizes)} (size, rows) were seen")
    if not _answers_are_cached(done, again, core.blocks.lcm_block_size):
        raise CheckFailed(f"graph = eager: second turns found only {again.cached} tokens cached")
    return done, again, turns


def _answers_are_cached(done: EngineRun, again: EngineRun, block: int) -> bool:
    """Each that ends a block, and there are some."""
    ends = {
        i: (len(ASKS[i].prompt) + len(done.tokens[i]) - 1) // block * block > len(ASKS[i].prompt)
        for i in CHATS
    }
    found = zip(CHATS, again.cached, strict=True)
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


def watched(graphs: DecodeGraphs, seen: set[tuple[GraphKey, int]]) -> Callable[..., GraphOutputs]:
    """`graphs.run`, which notes the key and the rows of each step, and looks at its padding."""
    plain = graphs.run

    def watched_run(
        batch: Batch, states: Sequence[SamplingState], places: Mapping[int, int]
    ) -> GraphOutputs:
        made = plain(batch, states, places)
        rows = len(made.tokens) // made.key.tokens_per_row
        seen.add((made.key, rows))
        padded = graphs.padded_hidden(made.key)[len(made.tokens) :]
        if not bool(padded.isfinite().all()):
            raise CheckFailed("graph = eager: padded rows have read what nobody owns")
        return made

    return watched_run


GPU_CHECKS: dict[str, Callable[[Subject], None]] = {
    "any heads": any_heads,
    "graph = eager": graph_is_eager,
    "masked prefill": masked_prefill,
}
"""Of what only a GPU has."""
