"""What failed, taken out of a run: the requests of its composition, and of the half of a layer that
was wrong what the engine gave it, what it made of it, what the definition makes of it, and its
weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trueline.config import EngineConfig
from trueline.plan.memory import AUTO_BLOCK_SIZE, Limits
from trueline.plan.plan import Plan
from trueline.reference import ENDS
from trueline.reference.config import Config
from trueline.reference.model import FEED, MIX
from trueline.reference.weights import Prefix, is_foreign, is_of, renamed
from trueline.verify.replay.file import (
    HALVES,
    HEAD,
    STORED,
    STORED_AT,
    Asked,
    Followed,
    HalfOfLayer,
    Header,
    OpChecked,
    Recorded,
    differing,
)
from trueline.verify.report import Check, Place
from trueline.verify.suite import environment
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.definition import EXACT
from trueline.verify.suite.judgement import CACHE_ROWS, Judgement, Off
from trueline.verify.suite.numbers import Numbers
from trueline.verify.suite.observe import Key, Observed
from trueline.verify.suite.session import Session
from trueline.weights.checkpoint import open_checkpoint

MOST_ROWS = 64 << 20
"""Bytes of requests' rows in a file; of those that did not fail none are kept beyond it."""
MOST_WEIGHTS = 256 << 20


def record(
    numbers: Numbers, check: Check, composition: Composition | None, op: OpChecked | None = None
) -> Recorded:
    """Without weights: see `add_weights`."""
    session = numbers.session
    changes = composition.changes if composition else {}
    made = Recorded(Header(
        check=check.id,
        invariant=check.invariant,
        what=check.what,
        evidence=check.evidence,
        model=environment.model(session),
        environment=environment.environment(session),
        plan=session.plan_lines,
        implementations={op: each.name for op, each in session.plan.selections.items()},
        config=differing(_stated(session.engine_config(**changes), session.plan)),
        config_json=(session.model / "config.json").read_text(),
        compute=dtype_name(session.plan.compute_dtype),
        bands=list(numbers.bands.bands.items()) if numbers.bands else [],
        place=check.place,
        asked=_asked(composition, session) if composition else None,
        op=op,
    ))  # fmt: skip
    place = check.place
    if composition is not None and place is not None and composition.name in numbers.judged:
        half = half_of(place.part)
        if half is not None or place.part in ("entry", HEAD):
            _Half(numbers, composition, place).put_into(made)
    return made


def half_of(part: str | None) -> str | None:
    """Where this part's weights are; an entry may be either half's."""
    if part in ("mixer", "selection", CACHE_ROWS):
        return "mixer"
    return "feed forward" if part in ("feed forward", "experts") else None


def names_of(config: Config, layer: int, half: str) -> Prefix:
    """How the names begin of what a half of a layer has, its entry included; ENDS for the head."""
    if half == HEAD:
        return ENDS
    at, own = f"model.layers.{layer}", {"mixer": "self_attn.", "feed forward": "mlp."}
    norm, mixing = HALVES[half]
    found = (f"{at}.{own[half]}", f"{at}.{norm}.")
    # several streams are read by weights of the layer, and of the model
    return found if config.v4 is None else (*found, f"{at}.{mixing}.", "model.hc_head.")


def add_weights(recorded: Recorded, model: Path, config: Config, most: int = MOST_WEIGHTS) -> None:
    half = recorded.header.half
    checkpoint = open_checkpoint(model)
    if half is None or checkpoint is None:
        return
    names = names_of(config, half.layer, half.half)
    found = [
        tensor
        for name, tensor in checkpoint.tensors.items()
        if is_of(renamed(name, config), names) and not is_foreign(renamed(name, config), config)
    ]
    size = sum(tensor.nbytes for tensor in found)
    if size > most:
        recorded.header.left_out.append(
            f"the weights, {size / 1e6:,.0f} MB of {most / 1e6:,.0f}: replay it with --model"
        )
        return
    for tensor in found:
        with safe_open(tensor.file, framework="pt") as opened:
            recorded.weights[tensor.name] = opened.get_tensor(tensor.name)


def _stated(config: EngineConfig, plan: Plan) -> EngineConfig:
    """What another machine would choose otherwise, and a schedule depends on."""
    limits = Limits.of(config, plan.device)
    size = config.block_size
    return replace(
        config,
        block_size=AUTO_BLOCK_SIZE[plan.device.kind] if size == "auto" else size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        overlap=limits.overlap,
        # two ways to multiply the same quantised weights
        numerics="activations" if plan.numerics.name == "activations" else config.numerics,
    )


def _asked(composition: Composition, session: Session) -> Asked:
    return Asked(
        name=composition.name,
        invariant=composition.invariant,
        what=composition.what,
        asks=composition.asks,
        same_bits=composition.same_bits,
        abort=composition.abort,
        turned_over=composition.turned_over,
        ranks=composition.ranks,
        expert_parallel=composition.expert_parallel,
        seed=session.seed,
    )


class _Half:
    """The half of a layer that a place names, in the request that it names."""

    def __init__(self, numbers: Numbers, composition: Composition, place: Place) -> None:
        self.judge, self.definition = numbers.judge, numbers.session.definition
        self.session, self.place = numbers.session, place
        self.judged = numbers.judged[composition.name]
        self.observed = numbers.ran[composition.name].requests.observed
        assert place.request is not None
        assert place.part is not None
        self.request, self.part = place.request, place.part
        self.layer = self.definition.num_layers if place.layer is None else place.layer
        self.half = HEAD if place.part == HEAD else half_of(place.part) or self._half_of_entry()
        self.residuals = {}
        if self.part in ("entry", HEAD):
            self.residuals = {i: self._residual(request) for i, request in enumerate(self.observed)
                              if request.count}  # fmt: skip

    @property
    def key(self) -> Key:
        return self.layer, HALVES[self.half]

    def _half_of_entry(self) -> str:
        """The first one whose entry is wrong."""
        entries = [
            off for off in self.judged.offs
            if (off.layer, off.part, off.request) == (self.layer, "entry", self.request)
        ]  # fmt: skip
        return "mixer" if self.judged.wrong_of(entries[0]) else "feed forward"

    def _residual(self, request: Observed) -> Tensor:
        layer, half = (self.layer, MIX) if self.half == HEAD else self.key
        return self.judge.residual(request, layer, half)

    def put_into(self, made: Recorded) -> None:
        failed = self.observed[self.request]
        judged, exact = self._judged_alone(failed)
        off = next(off for off in judged.offs if off.part == self.part)
        found = next(iter(judged.wrong_of(off)), None)
        plan = self.session.plan
        made.header.half = HalfOfLayer(
            layer=self.layer,
            half=self.half,
            part=self.part,
            request=self.request,
            position=self.place.position or 0,
            value=found.value if found else float(off.values.nan_to_num(torch.inf).max()),
            accepted=found.accepted if found else judged.accepted(self.layer, self.part),
            stored=dtype_name(plan.weight_dtype),
            numerics=plan.numerics.name,
            key_noise=self.judge.key_noise,
            requests=[_followed(request) for request in self.observed],
        )
        self._put_results(made, failed, off, exact[self.part])
        room = MOST_ROWS - sum(each.nbytes for each in made.tensors.values())
        others = [i for i in range(len(self.observed)) if i != self.request]
        for i in (self.request, *others):
            if not self.observed[i].count:
                continue
            rows = self._given(i)
            size = sum(each.nbytes for each in rows.values())
            if i != self.request and size > room:
                made.header.left_out.append(f"rows of request {i}")
                continue
            room -= size
            made.tensors |= {f"{i}.{name}": each.cpu() for name, each in rows.items()}

    def _judged_alone(self, failed: Observed) -> tuple[Judgement, dict[str, Tensor]]:
        if self.half == HEAD:
            residual = self.residuals[self.request]
            return self.judge.the_head(failed, residual, self.judged)
        return self.judge.one_half(
            self.key, failed, self.layer, self.judged,
            residual=self.residuals.get(self.request), shared=self._shared(failed),
        )  # fmt: skip

    def _put_results(self, made: Recorded, failed: Observed, off: Off, exact: Tensor) -> None:
        """What the engine made of it, and what the definition does."""
        at = f"{self.request}."
        if self.half == HEAD:  # as many rows as there is room for, the worst first
            most = max(MOST_ROWS // 2 // exact[0].nbytes, 1)
            rows = off.positions[off.values.nan_to_num(torch.inf).argsort(descending=True)[:most]]
            made.tensors[at + "at"] = rows
            made.tensors[at + "output"] = torch.stack([failed.logits[int(p)] for p in rows])
            made.tensors[at + "exact"] = exact[rows]
            return
        made.tensors[at + "exact"] = exact.cpu()
        made.tensors[at + "output"] = failed.rows(self.key, outputs=self.part != "entry")
        if found := failed.experts.get(self.layer):
            made.tensors[at + "experts"] = torch.stack([found[p] for p in range(failed.count)])
        if self.half == "mixer" and (chosen := failed.chosen.get(self.layer)):
            made.tensors[at + "chosen_at"] = torch.tensor(sorted(chosen))
            made.tensors[at + "chosen"] = torch.stack([chosen[p] for p in sorted(chosen)])
        for kind, held in failed.stored.get(self.layer, {}).items() if self.half == "mixer" else ():
            made.tensors[f"{at}{STORED_AT}{kind}"] = torch.tensor(sorted(held))
            made.tensors[f"{at}{STORED}{kind}"] = torch.stack([held[p] for p in sorted(held)])

    def _given(self, i: int) -> dict[str, Tensor]:
        request = self.observed[i]
        if i not in self.residuals:
            rows = {"input": request.rows(self.key)}
            shared = self._shared(request)
            return rows if shared is None else rows | {"shared": shared}
        rows = {"input": self.residuals[i].to(EXACT)}
        before = self._before()
        if before is not None:
            rows["added"] = request.rows(before, outputs=True)
        return rows

    def _before(self) -> Key | None:
        """The half whose output is added where this one's entry reads."""
        if self.half == HEAD or self.definition.config.v4 is not None:
            return None
        if self.half == "feed forward":
            return self.layer, MIX
        return (self.layer - 1, FEED) if self.layer else None

    def _shared(self, request: Observed) -> Tensor | None:
        """Keys that the layer before has chosen, where this one takes them."""
        if self.half != "mixer" or self.part == "entry":
            return None
        owner = _owner(self.definition.config, self.layer)
        if owner is None or owner == self.layer:
            return None
        return self.judge.sequence(request).selected(owner)[owner].cpu()


def _owner(config: Config, layer: int) -> int | None:
    """The layer that chooses for this one."""
    if config.indexer is None:
        return None
    own = [i for i in range(layer + 1) if not config.indexer.shared[i]]
    return own[-1] if own else None


def _followed(request: Observed) -> Followed:
    return Followed(
        tokens=request.tokens,
        paths=[request.paths.get(p, "") for p in range(request.count)],
        reused=sorted(request.reused),
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
