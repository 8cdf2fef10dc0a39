"""Checks of layers and modes, from compositions that have run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from trueline.verify.engine import EngineRun
from trueline.verify.report import Measure, Place
from trueline.verify.suite import captured, compositions
from trueline.verify.suite.composition import Composition, Ran
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.held import Rounded
from trueline.verify.suite.judge import Judge
from trueline.verify.suite.judgement import (
    CACHE_ROWS,
    ITSELF,
    PARTS,
    Judgement,
    Off,
    Requests,
    median,
    place_of,
)
from trueline.verify.suite.observe import Observed
from trueline.verify.suite.outcome import Outcome, Todo, Wrong
from trueline.verify.suite.session import Session

KINDS_OF_OPS: Mapping[str, tuple[str, ...]] = {
    "mixer": (
        *("mla_prefill", "mla_decode", "sparse_mla", "sink_attention", "lightning", "compress"),
        *("latent_write", "qkv_prepare", "gated_norm", "batched_gemm", "rope", "linear"),
    ),
    CACHE_ROWS: ("latent_write", "row_rounding", "compress", "qkv_prepare", "rope"),
    "selection": ("index_scores", "index_write", "topk"),
    "experts": ("route",),
    "feed forward": ("experts", "mlp", "linear"),
    "entry": ("rms_norm", "hyper_connections"),
    ITSELF: (),
    "head": ("linear", "rms_norm"),
}


ENGINE_PARTS = tuple(part for part in PARTS if part != ITSELF)


@dataclass
class Numbers:
    """Compositions run and judged as they are asked for."""

    session: Session
    judge: Judge = field(init=False)
    bands: Judgement | None = None
    judged: dict[str, Judgement] = field(default_factory=dict)
    ran: dict[str, Ran] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)
    """What running or judging a composition has raised."""
    together: list[Composition] = field(default_factory=list)
    """Those to run and judge at once, in one pass over the layers."""
    progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def __post_init__(self) -> None:
        plan = self.session.plan
        self.judge = Judge(
            self.session.definition, plan.compute_dtype,
            key_noise=key_noise(plan), rounded=Rounded.of(plan),
        )  # fmt: skip

    def run(self, composition: Composition) -> Judgement:
        """Alone, or with all others where layers are too large to be read for each."""
        if composition.name not in self.judged and composition.name not in self.refused:
            self._run(self.together or [composition])
        if composition.name in self.refused:
            raise self.refused[composition.name]
        return self.judged[composition.name]

    def _run(self, some: Sequence[Composition]) -> None:
        for number, each in enumerate(some):
            self.progress(each.name, number, len(some))
            self.serve(each)
        names = [each.name for each in some if each.name in self.ran]
        if not names:
            return
        first = self.ran[names[0]].requests
        baseline = [Requests(first.composition, first.observed[:1])]
        given = [self.ran[name].requests for name in names]
        try:
            found = self.judge.judge(given, baseline, self.bands)
        except Exception as error:
            self.refused |= dict.fromkeys(names, error)
            raise
        if self.bands is None:
            self.bands = found
        for name in names:
            self.judged[name] = found.of(name)

    def serve(self, composition: Composition) -> None:
        """By the engine, once."""
        if composition.name in self.ran or composition.name in self.refused:
            return
        try:
            self.ran[composition.name] = compositions.run(self.session, composition)
        except Exception as error:  # told by the check that asks for it
            self.refused[composition.name] = error

    def place(self, off: Off, position: int) -> Place:
        observed = self.ran[off.composition].requests.observed[off.request]
        place = place_of(off, position, observed)
        chosen = self.session.plan.selections
        if off.part in ("mixer", "selection", CACHE_ROWS):
            place = replace_place(
                place, block=self._block(off.layer, position, observed),
                slot=self._slot(off.layer, position, observed),
            )  # fmt: skip
        op = next((op for op in KINDS_OF_OPS[off.part] if op in self._likely(place, off)), None)
        if op is None or op not in chosen:
            return place
        return replace_place(place, op=op, implementation=chosen[op].name)

    def _block(self, layer: int, position: int, observed: Observed) -> int | None:
        held = observed.blocks.get(position, [])
        for group, block in zip(self.session.plan.groups, held, strict=False):
            if any(layer in kind.layers for kind in group.kinds):
                return block
        return None

    def _slot(self, layer: int, position: int, observed: Observed) -> int | None:
        kept = any(layer in kind.layers for kind in self.session.plan.slotted)
        return observed.slots.get(position) if kept else None

    def _likely(self, place: Place, off: Off) -> set[str]:
        """The op that makes the part's result; attention's depends on how it was computed."""
        chosen = self.session.plan.selections
        kind = self.judged[off.composition].kinds.get(off.layer, {}).get(off.part, "")
        if off.part == "mixer":
            if kind.startswith("linear"):
                return {"lightning"}
            if kind.startswith("compressed"):
                return {"sink_attention"}
            decode = (place.path or "").startswith("decode")
            return {"mla_decode" if decode else "mla_prefill"}
        if off.part == "entry" and "hyper_connections" in chosen:
            return {"hyper_connections"}
        if off.part == "feed forward":
            return {"experts" if kind == "experts" else "mlp"}
        return set(KINDS_OF_OPS[off.part])


def replace_place(place: Place, **changes: object) -> Place:
    fields = {name: getattr(place, name) for name in place.__struct_fields__}
    return Place(**{**fields, **changes})


def key_noise(plan: object) -> float:
    """Of index keys kept in fp8: half a step of e4m3 in every product, of scores that are sums."""
    for kind in getattr(plan, "kinds", ()):
        storage = getattr(getattr(kind, "layout", None), "storage", "")
        if "e4m3" in str(storage) and kind.label == "selection":
            return 2.0**-4
    return 0.0


def layer_checks(numbers: Numbers, first: Composition) -> Iterator[Todo]:
    yield Todo(
        "layers/each half",
        "engine = definition",
        "each half of each layer, on the engine's own inputs, at every position of the prompt and "
        "of the answer",
        lambda: judged_layers(numbers, first),
    )


def definition_checks(numbers: Numbers, first: Composition) -> Iterator[Todo]:
    yield Todo(
        "definition/layers",
        "definition = itself",
        "each half of each layer of the definition, in float64: absorbed and expanded, token by "
        "token and in tiles, with the engine's choices and with its own",
        lambda: judged_definition(numbers, first),
    )


def mode_checks(numbers: Numbers, others: Sequence[Composition]) -> Iterator[Todo]:
    for composition in others:
        yield Todo(
            f"modes/{composition.name}",
            composition.invariant,
            composition.what,
            lambda composition=composition: judged_mode(numbers, composition),  # type: ignore[misc]
        )


def judged_definition(numbers: Numbers, composition: Composition) -> Outcome:
    judgement = numbers.run(composition).only(ITSELF)
    if not judgement.offs:
        raise NotForced("noise was measured with another composition")
    measures = _measures(numbers, judgement, composition.name)
    _require_right(numbers, judgement, composition, measures)
    return Outcome(f"{judgement_layers(judgement)} layers", measures)


def judged_layers(numbers: Numbers, composition: Composition) -> Outcome:
    judgement = numbers.run(composition).only(*ENGINE_PARTS)
    measures = _measures(numbers, judgement, composition.name)
    _require_right(numbers, judgement, composition, measures)
    observed = numbers.ran[composition.name].requests.observed[0]
    return Outcome(
        f"{judgement_layers(judgement)} layers at {len(observed.computed)} positions",
        measures,
        _chosen(numbers.session),
    )


def judgement_layers(judgement: Judgement) -> int:
    return len({off.layer for off in judgement.offs if off.part != "head"})


def judged_mode(numbers: Numbers, composition: Composition) -> Outcome:
    if composition.captured:
        outcome = captured.check(numbers, composition)
        return replace(outcome, ran=_chosen(numbers.session))
    judgement = numbers.run(composition).only(*ENGINE_PARTS)
    ran = numbers.ran[composition.name]
    measures = _measures(numbers, judgement, composition.name)
    evidence = composition.forced(ran)
    _require_right(numbers, judgement, composition, measures)
    require_likeliest(composition, ran.done)
    if composition.same_bits is not None:
        twin = compositions.run(numbers.session, composition, **composition.same_bits)
        compositions.require_same_bits(composition.invariant, ran.done, twin.done)
        evidence += "; the same bits without"
    if composition.same_on_one:
        one = compositions.run(numbers.session, replace(composition, ranks=1))
        compositions.require_same_bits(composition.invariant, ran.done, one.done)
        evidence += "; the same bits on one rank"
    if composition.alone is not None:
        asks = [replace(composition.asks[composition.alone], arrives=0)]
        changes = {"max_num_batched_tokens": session_budget(numbers.session)}
        alone = compositions.run(numbers.session, replace(composition, asks=asks), **changes)
        together = ran.done.only(composition.alone)
        compositions.require_same_bits(composition.invariant, alone.done, together)
        evidence += f"; request {composition.alone} has the same bits alone, in one step"
    return Outcome(evidence, measures, _used(numbers.session, ran))


def session_budget(session: Session) -> int:
    """Tokens of a step that takes any of the checks' prompts whole."""
    return max(session.plan.limits.max_num_batched_tokens, session.longest)


def _chosen(session: Session) -> dict[str, str]:
    return {op: chosen.name for op, chosen in session.plan.selections.items()}


def _used(session: Session, ran: Ran) -> dict[str, str]:
    """Of them, what this composition's rows went through."""
    paths = {
        path.partition(",")[0] for each in ran.requests.observed for path in each.paths.values()
    }
    other = {"decode": "mla_decode", "prefill": "mla_prefill"}
    unused = {op for path, op in other.items() if path not in paths}
    return {op: name for op, name in _chosen(session).items() if op not in unused}


def _measures(numbers: Numbers, judgement: Judgement, composition: str) -> list[Measure]:
    """The worst of each part, and the worst median row."""
    measures: list[Measure] = []
    for part in PARTS:
        offs = [o for o in judgement.offs if o.part == part and len(o.values)]
        if not offs:
            continue
        worst = max(offs, key=lambda o: ratio(judgement, o))
        at = int(worst.values.nan_to_num(torch.inf).argmax())
        measures.append(Measure(
            name=part,
            value=float(worst.values[at]),
            band=judgement.band(worst.layer, part),
            gate=judgement.accepted(worst.layer, part),
            place=numbers.place(worst, int(worst.positions[at])),
        ))  # fmt: skip
        middle = max(
            (found for off in offs for found in judgement.medians(off)),
            key=lambda found: found.value / found.accepted,
            default=None,
        )
        if middle is not None:
            measures.append(Measure(
                name=median(part),
                value=middle.value,
                band=middle.band,
                gate=middle.accepted,
                place=numbers.place(middle.off, middle.position),
            ))  # fmt: skip
    return measures


def ratio(judgement: Judgement, off: Off) -> float:
    return float(off.values.nan_to_num(torch.inf).max()) / judgement.gate(off.layer, off.part)


def _require_right(
    numbers: Numbers, judgement: Judgement, composition: Composition, measures: list[Measure]
) -> None:
    wrong = judgement.first_wrong()
    if wrong is None:
        return
    off = wrong.off
    place = numbers.place(off, wrong.position)
    layers = sorted({each.off.layer for each in judgement.wrong()})
    count = numbers.session.definition.num_layers
    which = "all layers" if len(set(layers) - {count}) == count else f"{len(layers)} layers"
    kind = judgement.kinds.get(off.layer, {}).get(off.part, off.part)
    held = "definition = itself" if off.part == ITSELF else composition.invariant
    raise Wrong(
        f"{held}: {place}: {kind} is {wrong}; wrong in {which}",
        place,
        measures,
        _used(numbers.session, numbers.ran[composition.name]),
    )


def require_likeliest(composition: Composition, done: EngineRun) -> None:
    """A greedy answer is the likeliest token of the logits before it."""
    for i, (ask, tokens) in enumerate(zip(composition.asks, done.tokens, strict=True)):
        if ask.params.get("temperature"):
            continue
        for n, token in enumerate(tokens):
            at = len(ask.prompt) - 1 + n
            row = done.sampled_from[i].get(at, done.logits[i].get(at))
            if row is not None and int(row.argmax()) != token and row[token] != row.max():
                raise Wrong(
                    f"greedy: request {i}, position {at}: token {token} was sampled, "
                    f"{int(row.argmax())} is likelier",
                    Place(composition=composition.name, request=i, position=at, part="logits"),
                    [],
                )
