"""What structured output costs those who ask for it, and those beside them who do not: the same
streams decode on, half of them in turn with a schema and without."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles

from trueline.bench.canaries import Clock
from trueline.bench.decoding import PROMPT
from trueline.bench.workload import Workload
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.engine.grammars import Grammars
from trueline.engine.messages import CoreRequest
from trueline.engine.params import SamplingParams
from trueline.errors import EngineBroken, UsageError
from trueline.grammar.compiled import json_grammar
from trueline.grammar.constraint import Constraint
from trueline.grammar.vocabulary import vocabulary_of
from trueline.llm import LLMEngine
from trueline.utils.gc_frozen import gc_frozen
from trueline.utils.json_types import JSON

WARM_STEPS = 3
JSON_TOKENS = ('{"', '":', '": ', '"}', '", "', '",', '": "', '"]', "[]", "{}", "},", '},{"',
               "],", "true", "false", " null", "null", "\n  ", "\n    ", "  ", "    ")  # fmt: skip
LETTERS = "etaoinshrdlucmwfgypbvkjxqzéüñ"
WEIGHTS = [2 ** -(i / 5) for i in range(len(LETTERS))]
NUM_ITEMS = 400
"""Of the list that a stream says: it does not end before the measurement does."""


def schema(i: int) -> JSON:
    """A list of records as applications ask for them, each stream's with names of its own."""
    record = {
        f"name_{i}": {"type": "string", "maxLength": 24},
        f"age_{i}": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "company", "robot", None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,9}$"}},
        "born": {"type": "string", "format": "date"},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "place": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    }
    place = {"lat": {"type": "number"}, "lon": {"type": "number"}}

    def closed(properties: JSON) -> JSON:
        return {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }

    items = {"type": "array", "items": closed(record), "minItems": NUM_ITEMS}
    return items | {"$defs": {"place": closed(place)}}


@dataclass
class Phase:
    """Of one mode in one round."""

    tokens_per_s: float
    gaps_ms: list[float] = field(default_factory=list)
    """Between two tokens of those that never have a schema."""
    cpu_ms: float = 0.0
    """A step, of this process: what other programs use of the cores is not in it."""
    masks_ms: float = 0.0
    """A step, on the host: masks computed, and waiting for the tokens that they depend on."""


@dataclass(frozen=True, slots=True)
class GrammarCost:
    streams: int
    without: list[Phase]
    half: list[Phase]
    """In the same rounds, right after each other."""
    compile_ms: float
    """Of a schema, beside the loop."""

    @property
    def throughput_ratios(self) -> list[float]:
        pairs = zip(self.half, self.without, strict=True)
        return [half.tokens_per_s / without.tokens_per_s for half, without in pairs]

    @property
    def cpu_ratio(self) -> float:
        half, without = (median(p.cpu_ms for p in each) for each in (self.half, self.without))
        return half / max(without, 1e-9)

    @property
    def p99_ms(self) -> tuple[float, float]:
        """Between tokens of the plain ones: without schemas beside them, and with."""
        without, half = (
            quantiles([gap for phase in phases for gap in phase.gaps_ms], n=100)[98]
            for phases in (self.without, self.half)
        )
        return without, half

    def as_json(self) -> JSON:
        without, half = self.p99_ms
        return {
            "streams": self.streams,
            "throughput_ratio": median(self.throughput_ratios),
            "throughput_ratios": self.throughput_ratios,
            "cpu_ratio": self.cpu_ratio,
            "p99_ms": {"without": without, "half": half},
            "p99_ratio": half / without,
            "compile_ms": self.compile_ms,
            "without": [asdict(phase) for phase in self.without],
            "half": [asdict(phase) for phase in self.half],
        }


class _Streams:
    """As many as asked for, always: the first half is plain, the other as it was begun last."""

    def __init__(self, engine: LLMEngine, count: int, grammars: list[str]) -> None:
        self.core: EngineCore = engine.core
        self._max = engine.plan.max_model_len
        self.prompts = Workload(count, PROMPT, 1).prompts(engine.spec.vocab.total)
        self.names = [f"stream-{i}" for i in range(count)]
        self.plain = set(self.names[: count // 2])
        self._grammars = iter(grammars)

    def begin(self, i: int, constrained: bool) -> None:
        if self.names[i] in self.core.requests:
            self.core.abort(self.names[i], report=False)
        constraint = Constraint(grammar=next(self._grammars)) if constrained else None
        request = CoreRequest(
            request_id=self.names[i],
            prompt_token_ids=self.prompts[i],
            params=SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
            eos_token_ids=[],
            constraint=constraint,
        )
        self.core.add(request)

    def step(self) -> Iterator[str]:
        """Whose tokens it brought."""
        for output in self.core.step():
            if output.error:
                raise EngineBroken(output.error)
            if output.finish_reason:
                raise UsageError(
                    f"the model's context of {self._max} tokens was full before the last phase "
                    "ended: give fewer or shorter rounds"
                )
            if output.token_ids:
                yield output.request_id

    def until_all_decode(self) -> None:
        """With WARM_STEPS more."""
        waiting = set(self.names)
        while waiting:
            waiting -= set(self.step())
        for _ in range(WARM_STEPS):
            list(self.step())

    def end(self) -> None:
        for name in self.names:
            self.core.abort(name, report=False)
        while self.core.has_unfinished():
            self.core.step()


def measure_grammars(
    engine: LLMEngine, streams: int, rounds: int, steps: int, arrivals: int = 0
) -> GrammarCost:
    """`rounds` pairs of phases of `steps` decode steps. `arrivals`: after so many steps one of the
    second half ends and another one comes, with a schema that nobody has seen in that mode."""
    tokens = stand_in_tokens(engine.spec.vocab.total)
    engine.core.grammars = Grammars(lambda: vocabulary_of(tokens))
    engine.core.grammars.prepare().result()
    clock = Clock()
    runner = local_runner(engine.core.executor)
    runner.masks.of = clock.timed(runner.masks.of)  # type: ignore[assignment,method-assign]
    most = rounds * (streams // 2 + (steps // arrivals if arrivals else 0))
    there = _Streams(engine, streams, [json_grammar(schema(i)) for i in range(most)])
    for i in range(streams):
        there.begin(i, False)
    found: dict[bool, list[Phase]] = {False: [], True: []}
    with gc_frozen():
        for turn in range(rounds):
            for constrained in ((False, True), (True, False))[turn % 2]:
                for i in range(streams // 2, streams):
                    there.begin(i, constrained)
                there.until_all_decode()
                found[constrained].append(_phase(there, clock, steps, arrivals, constrained))
    there.end()
    grammars = engine.core.grammars
    compile_ms = 1e3 * grammars.compile_seconds / max(grammars.num_compiled, 1)
    return GrammarCost(streams, found[False], found[True], compile_ms)


def _phase(there: _Streams, clock: Clock, steps: int, arrivals: int, constrained: bool) -> Phase:
    last: dict[str, float] = {}
    made, num_tokens, masks = Phase(0.0), 0, clock.seconds
    start, cpu = time.perf_counter(), time.process_time()
    next_one = len(there.names) // 2
    for step in range(steps):
        if arrivals and step % arrivals == arrivals - 1:
            there.begin(next_one, constrained)
            next_one = max((next_one + 1) % len(there.names), len(there.names) // 2)
        names = list(there.step())
        now = time.perf_counter()
        num_tokens += len(names)
        for name in there.plain.intersection(names):
            if name in last:
                made.gaps_ms.append(1e3 * (now - last[name]))
            last[name] = now
    made.tokens_per_s = num_tokens / (time.perf_counter() - start)
    made.cpu_ms = 1e3 * (time.process_time() - cpu) / steps
    made.masks_ms = 1e3 * (clock.seconds - masks) / steps
    return made


def stand_in_tokens(count: int) -> list[bytes]:
    """Like a real vocabulary, for models whose weights are drawn: bytes, what JSON is made of,
    numbers, and words with a space before them and without."""
    draw = random.Random(0)
    made = dict.fromkeys(bytes([each]) for each in range(256))
    made |= dict.fromkeys(text.encode() for text in JSON_TOKENS)
    made |= dict.fromkeys(
        f"{each:0{width}}".encode() for width in (2, 3) for each in range(10**width)
    )
    while len(made) < count:
        word = "".join(draw.choices(LETTERS, WEIGHTS, k=draw.randint(2, 11)))
        shape = draw.choice((str.lower, str.lower, str.title, str.upper))
        made[(draw.choice(("", " ", " ")) + shape(word)).encode()] = None
    return [*made][:count]
