"""The recorded part of the model, alone: the record judged again, and the part run on this machine
over the recorded inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.executor import local_runner
from trueline.errors import RequestRejected, UsageError
from trueline.models import read_model
from trueline.plan.plan import make_plan
from trueline.utils.json_types import JSON
from trueline.verify.engine import Ask
from trueline.verify.failed import CheckFailed
from trueline.verify.replay.file import HALVES, HEAD, Asked, HalfOfLayer, Recorded
from trueline.verify.replay.half import Given, engine_of
from trueline.verify.suite import compositions
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.definition import EXACT, Definition, Part
from trueline.verify.suite.held import Rounded
from trueline.verify.suite.judge import Judge
from trueline.verify.suite.judgement import CACHE_ROWS, Judgement
from trueline.verify.suite.observe import Observed
from trueline.verify.suite.session import DrawnTokens

ONE_RANK: JSON = {
    "tensor_parallel_size": 1,
    "enable_expert_parallel": False,
    "distributed_executor_backend": None,
    "data_parallel_size": 1,
    "data_parallel_rank": None,
}
"""Options with which a part that ranks share runs here."""
AS_SCHEDULED, ONE_PREFILL, DECODE = "as it was scheduled", "as one prefill", "token by token"
WAYS = (AS_SCHEDULED, ONE_PREFILL, DECODE)


@dataclass(frozen=True)
class Verdict:
    """How far the part was off in one way of running it. What ranks share runs on one."""

    way: str
    wrong: bool
    what: str
    """The first wrong part, or the worst that is right, with its position, its error and what is
    accepted; or what the engine said."""


def composition_of(asked: Asked) -> Composition:
    return Composition(
        name=asked.name,
        invariant=asked.invariant,
        what=asked.what,
        asks=asked.asks,
        forced=lambda ran: "as it was recorded",
        same_bits=asked.same_bits,
        abort=asked.abort,
        turned_over=asked.turned_over,
        ranks=asked.ranks,
        expert_parallel=asked.expert_parallel,
    )


@dataclass
class PartAlone:
    """`directory` has the model's config, and of its weights this part's at least; `definition` is
    of the same, and `weights` what it loads."""

    recorded: Recorded
    directory: Path
    definition: Definition
    weights: Part
    half: HalfOfLayer = field(init=False)
    asked: Asked = field(init=False)

    def __post_init__(self) -> None:
        assert self.recorded.header.half is not None
        assert self.recorded.header.asked is not None
        self.half, self.asked = self.recorded.header.half, self.recorded.header.asked
        self.bands = self.recorded.header.noise()
        self.then: torch.dtype = getattr(torch, self.recorded.header.compute)
        self.request = self.half.request

    # -- the record --------------------------------------------------------------------

    def judge_record(self) -> Verdict:
        """With what was accepted then."""
        judgement, exact = self._judged(self._as_recorded(), self.then)
        verdict = self._verdict("the record", judgement)
        then = self.recorded.of_request("exact", self.request)
        now = exact[self.half.part]
        if then is None or self.half.part in ("experts", "selection", CACHE_ROWS):
            return verdict
        if self.half.part == HEAD:
            at = self.recorded.of_request("at", self.request)
            assert at is not None
            now = now[at]
        off = float((now.cpu() - then).abs().max() / then.abs().max().clamp_min(1e-30))
        if off > 1e-9:
            what = f"{verdict.what}; the definition differs from the recorded one by {off:.2g}"
            return replace(verdict, what=what)
        return verdict

    def _as_recorded(self) -> Observed:
        half, at = self.half, self.request
        followed = half.requests[at]
        made = Observed(tokens=followed.tokens)
        made.paths = dict(enumerate(followed.paths))
        made.reused = set(followed.reused)
        output = self._of("output")
        if half.half == HEAD:
            made.logits = dict(zip(self._of("at").tolist(), output, strict=True))
            return made
        key = half.layer, HALVES[half.half]
        if half.part == "entry":
            made.inputs[key] = dict(enumerate(output))
            return made
        made.inputs[key] = dict(enumerate(self._of("input")))
        made.outputs[key] = dict(enumerate(output))
        experts = self.recorded.of_request("experts", at)
        if experts is not None:
            made.experts[half.layer] = dict(enumerate(experts))
        chosen = self.recorded.of_request("chosen", at)
        if chosen is not None:
            places = self._of("chosen_at").tolist()
            made.chosen[half.layer] = dict(zip(places, chosen, strict=True))
        made.stored[half.layer] = dict(self.recorded.stored(at))
        return made

    def _of(self, name: str) -> Tensor:
        found = self.recorded.of_request(name, self.request)
        assert found is not None, f"a record has its {name}"
        return found

    # -- here --------------------------------------------------------------------------

    def run(self, config: EngineConfig, ways: Sequence[str] = WAYS) -> Iterator[Verdict]:
        """On this machine."""
        for way in ways:
            if (reason := self.not_run(way)) is None:
                judgement, _ = self._judged(*self.observe(way, config))
                yield self._verdict(way, judgement)
            elif len(ways) == 1:
                raise UsageError(reason)

    def not_run(self, way: str) -> str | None:
        if way != AS_SCHEDULED:
            return None
        there = self._given().keys()
        missing = [i for i, each in enumerate(self.half.requests) if each.paths and i not in there]
        return f"rows of request {missing[0]} are not in the file" if missing else None

    def observe(self, way: str, config: EngineConfig) -> tuple[Observed, torch.dtype]:
        """What the part has made of the recorded inputs, and the dtype that it computed in."""
        part, half, config = self.half.part, self.half.half, replace(config, **ONE_RANK)
        name = f"entry of {half}" if part == "entry" else half
        given, composition, at = self._given(), composition_of(self.asked), self.request
        if way != AS_SCHEDULED:
            given, at = {0: given[self.request]}, 0
            composition, config = self._by_itself(way, config)
        try:
            with engine_of(name, self.half.layer, self.directory, config, given) as core:
                ran = compositions.serve_watched(self._drawn(core.plan), composition, core)
                compute = core.plan.compute_dtype
                alone: Any = local_runner(core.executor).decoder
        except (CheckFailed, RequestRejected) as error:
            raise UsageError(f"{way}: {error}") from error
        observed = ran.requests.observed[at]
        observed.tokens = self.half.requests[self.request].tokens
        # an engine of some layers numbers them by their places
        rows = observed.stored.get(alone.at) if half == "mixer" and part != "entry" else None
        observed.stored = {self.half.layer: rows} if rows else {}
        if part == "entry":
            observed.outputs.clear()
        return observed, compute

    def _by_itself(self, way: str, config: EngineConfig) -> tuple[Composition, EngineConfig]:
        followed = self.half.requests[self.request]
        tokens = followed.tokens[: len(followed.paths)]
        if way == ONE_PREFILL:
            ask, most = Ask(tokens, 1), max(len(tokens), config.max_num_batched_tokens or 0)
            config = replace(config, max_num_batched_tokens=most)
        else:
            ask = Ask(tokens[:1], len(tokens))
        whole = composition_of(self.asked)
        return replace(whole, asks=[ask], abort={}, turned_over=False), config

    def _drawn(self, plan: object) -> DrawnTokens:
        return DrawnTokens(self.definition.config.vocab_size, self.asked.seed)

    def _given(self) -> dict[int, Given]:
        recorded, found = self.recorded, {}
        for i, followed in enumerate(self.half.requests):
            rows = recorded.of_request("input", i)
            if rows is not None:
                more = (recorded.of_request(name, i) for name in ("added", "shared"))
                found[i] = Given(followed.tokens, rows, *more)
        return found

    @cached_property
    def _rounded(self) -> Rounded | None:
        """How caches rounded then: by options, whatever the machine is."""
        header = self.recorded.header
        config = header.engine_config(device="cpu", ops={}, layers={}, **ONE_RANK)
        spec = read_model(self.directory, config.facts)
        return Rounded.of(make_plan(spec, config, find_device("cpu")))

    # -- judging -----------------------------------------------------------------------

    def _judged(
        self, observed: Observed, compute: torch.dtype
    ) -> tuple[Judgement, dict[str, Tensor]]:
        """With what was accepted then. In a coarser dtype noise is measured again, and what it adds
        is bounded by the dtypes' steps: inputs may be such that nothing of it means anything."""
        steps = max(torch.finfo(compute).eps / torch.finfo(self.then).eps, 1.0)
        limit = {of: steps * value for of, value in self.bands.bands.items()} if steps > 1 else None
        half = self.half
        judge = Judge(
            self.definition, compute, key_noise=half.key_noise, rounded=self._rounded
        )  # fmt: skip
        rows = self._of("input").to(self.definition.device)
        if half.half == HEAD:
            return judge.the_head(observed, rows.to(EXACT), self.bands, limit=limit)
        residual = rows.to(EXACT) if half.part == "entry" else None
        shared = self.recorded.of_request("shared", self.request)
        return judge.one_half(
            (half.layer, HALVES[half.half]), observed, self.weights, self.bands,
            residual=residual,
            shared=shared,
            limit=limit,
        )  # fmt: skip

    def _verdict(self, way: str, judgement: Judgement) -> Verdict:
        wrong = judgement.first_wrong()
        if wrong is not None:
            what = f"{wrong.off.part} at position {wrong.position}: {wrong}"
            return Verdict(way, True, what)
        layer, part = self.half.layer, self.half.part
        accepted = judgement.accepted(layer, part)
        worst = judgement.worst(layer, part)
        return Verdict(way, False, f"{part}: off by {worst:.3g}, accepted {accepted:.3g}")
