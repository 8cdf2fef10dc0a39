"""Which kernels a model's requests would compile after the engine is ready, on a machine without a
GPU: nothing is compiled, nothing launched, and tensors have no data (PyTorch's meta device).

    python tests/helpers/late_kernels.py DIRECTORY [--cold] [--most POSITIONS]  # of a config.json

Warm-up asks for kernels as on a Hopper GPU, and so do requests of many kinds afterwards; what
Triton itself takes for a kernel that is not compiled yet is told, and what the list for the next
start would have compiled otherwise. --cold: with no warm-up but the captured decode steps. --most:
with sequences of up to so many positions. Needs TRITON_INTERPRET unset.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

import trueline.device as device
import trueline.ops.launch as op_launch
from hopper import H200, SMS, Hopper
from stored_zeros import StoredZeros
from trueline.config import EngineConfig
from trueline.device import META, Device
from trueline.models import read_model
from trueline.spec.parameters import Parameter
from trueline.weights.load import held_dtype
from trueline.weights.value import Weight

Load = list[tuple[int, int, dict[str, Any]]]
"""Requests: when each arrives, the length of its prompt, and what it asks for; `grammar` beside the
fields of SamplingParams."""
STREAMS = (1, 7, 64, 200)
LENGTHS = (1, 2, 15, 16, 17, 37, 63, 64, 65, 500, 1023, 1024, 1025, 2047, 2048, 2049, 4000, 9001)
LONGEST = 20_000
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 5},
    {"logprobs": 0},
    {"prompt_logprobs": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    {"logit_bias": {1: 5.0}, "min_tokens": 2, "stop_token_ids": [3]},
    {"allowed_token_ids": [1, 2, 3], "temperature": 1.0},
    {"grammar": True},
    {"grammar": True, "temperature": 0.7, "min_p": 0.1},
    {"grammar": True, "temperature": 0.7, "top_p": 0.9, "logprobs": 5},
)


class Recorder:
    """Instead of Triton's compiler."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, str], str] = {}
        self.calls: dict[tuple[str, str], dict[str, Any]] = {}

    def __call__(self, *, key: Any, fn: Any, repr: str, **told: Any) -> bool:
        name = f"{fn.module}.{fn.name}", str(key)
        self.kernels.setdefault(name, repr)
        self.calls.setdefault(name, {"fn": fn, **told})
        return True


def pretend() -> Recorder:
    """From here on this machine has a Hopper GPU, whose memory is nowhere."""
    without_dynamo()
    triton.runtime.driver.set_active(Hopper())
    device.supports_pdl = device.runs_gluon = lambda: True
    op_launch.num_sms = lambda _: SMS  # type: ignore[assignment]
    Device.torch = property(lambda _: torch.device(META))  # type: ignore[assignment,method-assign]
    asked = Recorder()
    knobs.runtime.jit_cache_hook = asked
    return asked


def without_dynamo() -> None:
    """PyTorch keeps its compiler off what computes shapes; nothing is compiled here, and to import
    it takes longer than the requests."""
    dynamo = ModuleType("torch._dynamo")
    dynamo.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    sys.modules[dynamo.__name__] = torch._dynamo = dynamo


def answer(value: bool) -> None:
    """To everything that the host asks of tensors without data."""
    real = torch.Tensor.__bool__

    def told(x: Tensor) -> bool:
        return value if x.is_meta else real(x)

    torch.Tensor.__bool__ = told  # type: ignore[method-assign]
    count = torch.Tensor.__int__
    torch.Tensor.__int__ = lambda x: 0 if x.is_meta else count(x)  # type: ignore[method-assign]


class NoData(StoredZeros):
    def plain(self, parameter: Parameter) -> Weight:
        dtype = held_dtype(parameter, self._dtype)
        return Weight.of(torch.empty(parameter.shape, dtype=dtype, device=META))


def warm(model: Path, cold: bool, most: int | None = None) -> tuple[Any, Any]:
    """A dry run of the model, after its warm-up. Imported here: kernels are made when their
    modules are."""
    from trueline.engine.dry_run import DryRun
    from trueline.engine.runner import build_decoder
    from trueline.engine.warmup import Asked, sweep
    from trueline.ops.jit import dry_run
    from trueline.plan.plan import make_plan

    spec = read_model(model, {})
    config = EngineConfig(device="cuda", max_model_len=most)
    plan = make_plan(spec, config, H200)
    answer(False)  # no weight has more digits than its dtype
    weights = NoData(spec, dtype=plan.weight_dtype, device=torch.device(META), seed=0)
    dry = DryRun(spec, plan, build_decoder(spec, plan, weights))
    asked = Asked()
    with dry_run(asked):
        if cold:
            dry.decode_graphs()
        else:
            sweep(dry, asked)
    return dry, config


def changed_by_listing(asked: Recorder) -> list[str]:
    """Kernels that are not what they were after they have been written to a list, and read."""
    from trueline.engine.kernel_list import KernelList

    def compiled(recorder: Recorder) -> dict[Any, str]:
        return {name: repr(call["compile"]) for name, call in recorder.calls.items()}

    with TemporaryDirectory() as scratch:
        listed = KernelList(Path(scratch) / "list.json")
        assert not listed.ask()
        for call in asked.calls.values():
            listed.record(**call)
        listed.write()
        again = Recorder()
        knobs.runtime.jit_cache_hook = again
        assert KernelList(listed.file).ask()
    knobs.runtime.jit_cache_hook = asked
    differing = compiled(asked).items() ^ compiled(again).items()
    return sorted({str(name) for name, _ in differing})


def loads(rng: random.Random) -> Iterator[Load]:
    for streams in STREAMS:
        most = LONGEST if streams < 64 else 2 * LONGEST // streams + 2000
        yield [
            (rng.randrange(1 + streams // 8), rng.choice((*LENGTHS, rng.randrange(37, most))), {})
            for _ in range(streams)
        ]
    yield [(i, rng.choice(LENGTHS[:12]), ASKED[i % len(ASKED)]) for i in range(40)]
    yield [(i // 9, 17, {"grammar": True}) for i in range(70)]
    yield [(0, LONGEST, {}), (1, LONGEST - 1, {}), (9, 37, {"logprobs": -1})]


@cache
def zeros(vocab_size: int) -> Any:
    """A vocabulary whose first token alone has a text."""
    from trueline.grammar.vocabulary import vocabulary_of

    return vocabulary_of([b"0", *[b""] * (vocab_size - 1)])


def core_of(dry: Any, plan: Any, config: EngineConfig) -> Any:
    from trueline.engine.core import EngineCore
    from trueline.engine.executor import LocalExecutor
    from trueline.engine.grammars import Grammars

    core = EngineCore(LocalExecutor(dry.runner, threaded=False), plan, config)
    core.grammars = Grammars(lambda: zeros(dry.runner.spec.vocab.total))
    return core


def serve(core: Any, load: Load) -> None:
    """All of them, in an engine whose tokens are all 0."""
    from trueline.engine.messages import CoreRequest
    from trueline.engine.params import SamplingParams
    from trueline.grammar.compiled import regex_grammar
    from trueline.grammar.constraint import Constraint

    form = Constraint(grammar=regex_grammar("0*"))
    load = sorted(load, key=lambda request: request[0])
    step = 0
    while load or core.has_unfinished():
        while load and load[0][0] <= step:
            _, length, asked = load.pop(0)
            options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 3} | asked
            length = min(length, core.plan.max_model_len - options["max_tokens"])
            prompt = [step % 5, *[1] * (length - 1)]
            constraint = form if options.pop("grammar", False) else None
            core.add(
                CoreRequest(
                    request_id=f"{step}-{len(load)}",
                    prompt_token_ids=prompt,
                    params=SamplingParams(**options),
                    constraint=constraint,
                )
            )
        for output in core.step():
            assert not output.error, output.error
        step += 1


def shapes(dry: Any, rng: random.Random) -> None:
    """Steps of any rows that the scheduler may put together."""
    longest, limits = dry.plan.max_model_len, dry.plan.limits
    for _ in range(150):
        decode = rng.choice([0, 0, 1, 2, 3, 4, 5, rng.randrange(48, 96), rng.randrange(256)])
        reach = min(rng.choice([3, 2040, 2060, 5000, LONGEST, longest - 1]), longest - 1)
        rows = [(rng.randrange(1, reach), 1) for _ in range(decode)]
        left = rng.choice([16, 200, 2000, limits.max_num_batched_tokens]) - decode
        for _ in range(rng.choice([1, 1, 2, 7, 40])):
            count = rng.choice([1, 2, 5, 16, 17, 63, 500, 1025, left])
            if 0 < count <= min(left, longest) and len(rows) < limits.max_num_seqs:
                latest = min(LONGEST, longest - count + 1)
                start = 0 if count == 1 else rng.choice([0, rng.randrange(latest)])
                rows.append((start, count))
                left -= count
        if rows:
            dry.forward(rows)


def main(model: Path, cold: bool, most: int | None) -> None:
    asked = pretend()
    dry, config = warm(model, cold, most)
    ready = set(asked.kernels)
    changed = changed_by_listing(asked)
    from trueline.engine import results

    answer(True)  # what is sorted for top-p suffices
    results.to_host = lambda x: torch.zeros(x.shape, dtype=x.dtype)
    rng = random.Random(0)
    if most is not None:  # nothing longer was there to warm up with
        served = [(0, most - 9, {"max_tokens": 9}), (1, most - 10, {})]
        serve(core_of(dry, dry.plan, config), served)
    for load in islice(loads(rng), 3 if cold else None):
        serve(core_of(dry, dry.plan, config), load)
    if not cold:
        # blocks for hardly more than the longest prompt: requests are preempted
        count = LONGEST // dry.plan.block_size + 3
        groups = tuple(replace(group, num_blocks=count) for group in dry.plan.groups)
        few = replace(dry.plan, groups=groups)
        serve(core_of(dry, few, config), [(i // 4, 40 * i + 1, {}) for i in range(48)])
        shapes(dry, rng)
    late = {name: text for name, text in asked.kernels.items() if name not in ready}
    found = {"ready": len(ready), "late": sorted(late.values()), "changed_by_listing": changed}
    print(json.dumps(found))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    longest = int(arguments[arguments.index("--most") + 1]) if "--most" in arguments else None
    main(Path(arguments[0]), "--cold" in arguments, longest)
