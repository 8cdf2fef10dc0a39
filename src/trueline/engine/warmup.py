"""Every kernel that the engine may launch, compiled before the first request.

What is compiled depends on the number of tokens, rows and positions of a step, on the GPU and on
the model; only the ops know how. So steps of many shapes are run without data (dry_run.py), along
each number in turn: at the powers of two and between them, and wherever the kernels on both sides
differ, in the middle as well. What they ask for is compiled in several threads at once, and listed
for the next start (kernel_list.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from triton import AsyncCompileMode, FutureKernel, knobs
from triton.runtime import driver

from trueline.device import num_cores
from trueline.engine.dry_run import DryRun, Rows
from trueline.engine.kernel_list import KernelList
from trueline.engine.late_kernels import LOG
from trueline.engine.params import SamplingParams
from trueline.layers.decoder import Decoder
from trueline.ops.jit import Ask, dry_run
from trueline.plan.plan import Plan
from trueline.spec.model import ModelSpec

MOST_THREADS = 16
SAMPLED = (
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=1.0),
)
"""Of all that requests may ask for, what takes kernels of its own."""
CONTEXTS = [3 << i for i in range(4, 40, 2)]
LONG = 1 << 15


def compile_kernels(spec: ModelSpec, plan: Plan, decoder: Decoder) -> None:
    """And load them onto the GPU. A layer or op of another package may not run without data; its
    kernels are compiled when they are first launched, and `LateKernels` tells of them."""
    listed = KernelList.of(spec, plan, decoder)
    threads = min(num_cores(), MOST_THREADS)
    here = (torch.cuda.current_device(),)
    with ThreadPoolExecutor(threads, "kernels", torch.cuda.set_device, here) as pool:
        asked = Asked()
        knobs.runtime.jit_post_compile_hook = None  # of an engine that was loaded before
        with AsyncCompileMode(pool) as compiled:
            known = listed is not None and listed.ask()
            if not known:
                knobs.runtime.jit_cache_hook = listed and listed.record
                _sweep(spec, plan, decoder, asked)
        if listed is not None and not known and asked.all_new:
            listed.write()
        kernels = [each.result() for each in compiled.future_kernels.values()]
        load(kernels, pool)


def _sweep(spec: ModelSpec, plan: Plan, decoder: Decoder, asked: Asked) -> None:
    try:
        with dry_run(asked):
            sweep(DryRun(spec, plan, decoder), asked)
    except Exception as error:
        asked.all_new = False
        LOG.warning("not all kernels are compiled ahead: %r", error)
    finally:
        knobs.runtime.jit_cache_hook = None


def load(kernels: Sequence[Any], pool: Executor) -> None:
    """Triton compiles a launcher in C for every signature: in threads, which keep none of them. All
    launchers are modules of one name, and CPython puts one that it has loaded before into whichever
    was loaded last: of two threads that load, one may get the other's function."""
    list(pool.map(lambda each: driver.active.launcher_cls(each.src, each.metadata), kernels))
    for kernel in kernels:
        kernel[(1, 1, 1)]  # its launcher for that grid, which is not called


class Asked:
    """The kernels that steps ask for, each compiled when it is asked for first."""

    def __init__(self) -> None:
        self.ever: set[Ask] = set()
        self.lately: set[Ask] = set()
        self.all_new = True
        """No kernel was there already, compiled by this process before."""

    def __call__(self, ask: Ask, compile: Callable[[], object]) -> None:
        if ask not in self.ever:
            self.all_new &= isinstance(compile(), FutureKernel)
        self.ever.add(ask)
        self.lately.add(ask)

    def by(self, step: Callable[[], None]) -> set[Ask]:
        self.lately = set()
        step()
        return self.lately


def sweep(dry: DryRun, asked: Asked) -> None:
    dry.decode_graphs()
    for numbers, step in _axes(dry):
        _along(numbers, lambda n, step=step: asked.by(lambda: step(n)))  # type: ignore[misc]


def _axes(dry: DryRun) -> Iterator[tuple[list[int], Callable[[int], None]]]:
    """Each number that kernels depend on, with steps in which it grows and nothing else does."""
    longest, limits = dry.plan.max_model_len, dry.plan.limits
    tokens, seqs = min(limits.max_num_batched_tokens, longest), limits.max_num_seqs
    contexts = [*(n for n in CONTEXTS if n < longest - 1), longest - 1]

    def forward(rows: Callable[[int], Rows]) -> Callable[[int], None]:
        return lambda n: dry.forward(rows(n))

    yield points(tokens), forward(lambda n: [(0, n)])
    for context in contexts:  # decode rows of steps that are not captured, and cached prefixes
        # block tables of long contexts take time to make up, and kernels are chosen alike
        rows = points(seqs) if context < LONG else powers(seqs)
        yield rows, forward(lambda n, at=context: [(at, 1)] * n)  # type: ignore[misc]
        most = min(tokens, longest - context)
        yield powers(most), forward(lambda n, at=context: [(at, n)])  # type: ignore[misc]
    # between those contexts: kernels of a step that chooses depend on how much it scores
    yield powers(longest - 1), forward(lambda n: [(n, 1)])
    # the last tokens of the longest prompts
    yield powers(tokens), forward(lambda n: [(longest - n, n)])
    for count in powers(tokens):  # together more than one sequence may have
        most = min(seqs, limits.max_num_batched_tokens // count)
        yield powers(most), forward(lambda n, count=count: [(0, count)] * n)  # type: ignore[misc]
    for params in SAMPLED:
        yield points(seqs), lambda n, params=params: dry.sample(n, params)  # type: ignore[misc]
    yield points(seqs), lambda n: dry.sample(n, SAMPLED[0], masked=True)


def powers(most: int) -> list[int]:
    """Of two, and `most`."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})


def points(most: int) -> list[int]:
    """1 to `most`, denser where it is small."""
    around = (n for power in powers(most) for n in (power, power + 1, power * 3 // 2))
    return sorted({n for n in around if n <= most})


def _along(numbers: list[int], asked: Callable[[int], set[Ask]]) -> None:
    found = [(n, asked(n)) for n in numbers]
    between = list(pairwise(found))
    while between:
        (low, at_low), (high, at_high) = between.pop()
        if high - low < 2 or at_low == at_high:
            continue
        middle = (low + high) // 2
        new = asked(middle)
        if new - at_low - at_high:
            between += [((low, at_low), (middle, new)), ((middle, new), (high, at_high))]
