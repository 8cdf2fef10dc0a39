"""How small an error the run would have noticed: errors of graded size are put into the running
engine at named places, and the checks run again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trueline.engine.executor import local_runner
from trueline.layers.compressed import Compressed
from trueline.layers.decoder import Decoder, Layer
from trueline.verify.report import Place, Power
from trueline.verify.suite import compositions
from trueline.verify.suite.composition import Ran
from trueline.verify.suite.judgement import Judgement
from trueline.verify.suite.numbers import Numbers

SIZES = tuple(2.0**-k for k in range(2, 27, 2))
"""Tried from the middle on."""
PROMPT, ANSWER = 24, 6
TRIES = len(SIZES).bit_length()
"""Of sizes, for an injection."""
INJECTIONS = 12
"""About as many there are."""


Put = Callable[[Decoder, float], Callable[[], None]]
"""Takes the size of the error; returns what undoes it."""


@dataclass(frozen=True)
class Injection:
    """`put` changes the running engine, whose layer is wrong until it is undone."""

    place: Place
    what: str
    put: Put


def injections(num_layers: int, layers: list[Layer]) -> Iterator[Injection]:
    """In the middle of the model, in its last layer and behind it."""
    middle = num_layers // 2
    for layer in sorted({middle, num_layers - 1}):
        at = layers[layer]
        yield Injection(
            Place(layer=layer, part="mixer"), "noise on the output of token mixing, of its norm",
            _on_output(layer, "mixer"),
        )  # fmt: skip
        yield Injection(
            Place(layer=layer, part="mixer", path="decode"),
            "noise on the output of token mixing, of its norm, in decode steps of one request",
            _on_output(layer, "mixer", decode_only=True),
        )
        yield Injection(
            Place(layer=layer, part="feed forward"), "noise on the output of the feed-forward part",
            _on_output(layer, "feed_forward"),
        )  # fmt: skip
        yield from _on_norms(layer, at.mixer)
    yield Injection(
        Place(layer=middle, part="entry"), "noise on the weights of the norm before token mixing",
        _on_norm(middle),
    )  # fmt: skip
    yield Injection(Place(part="head"), "noise on the weights of the last norm", _on_last_norm)


def _on_norms(layer: int, mixer: Any) -> Iterator[Injection]:
    """Of latents. A factor on queries that are normed again, head by head, changes nothing."""
    again = isinstance(mixer, Compressed)
    factors = {"kv_norm": "rows of the KV cache"} | (
        {} if again else {"q_norm": "attention scores"}
    )
    place = Place(layer=layer, part="mixer")
    for name, what in factors.items():
        if hasattr(mixer, name):
            yield Injection(place, f"{what}, too large by this factor", _scaled(layer, name))
    if again:
        what = "noise on the weights of the queries' norm"
        yield Injection(place, what, _noisy_weights(layer, "q_norm"))


def measure(numbers: Numbers, progress: Callable[[int, int], None]) -> Iterator[Power]:
    """Each injection's smallest size that is seen."""
    session = numbers.session
    base = next(iter(compositions.compositions(session)))
    short = replace(
        base,
        name="power",
        asks=[replace(base.asks[0], prompt=session.tokens(PROMPT), max_tokens=ANSWER)],
    )
    salts = map(str, itertools.count())
    with session.core() as core:
        decoder = local_runner(core.executor).decoder

        def wrong(injection: Injection, size: float) -> Place | None:
            # nobody reads what a wrong engine has left in the prefix cache
            asks = [replace(ask, cache_salt=next(salts)) for ask in short.asks]
            undo = injection.put(decoder, size)
            try:
                ran = compositions.serve_watched(session.drawn, replace(short, asks=asks), core)
            finally:
                undo()
            return _first_wrong(numbers, ran, injection)

        todo = list(injections(session.definition.num_layers, decoder.layers))
        for number, injection in enumerate(todo):
            progress(number, len(todo))
            yield _smallest(injection, wrong)


def _smallest(injection: Injection, wrong: Callable[[Injection, float], Place | None]) -> Power:
    """By bisection over the sizes: what is seen at a size is seen at larger ones."""
    low, high = 0, len(SIZES)  # seen below `low`, unseen from `high` on
    named: Place | None = None
    while low < high:
        at = (low + high) // 2
        found = wrong(injection, SIZES[at])
        if found is None:
            high = at
        else:
            low, named = at + 1, found
    return Power(
        place=injection.place,
        what=injection.what,
        smallest=SIZES[low - 1] if low else None,
        unseen=SIZES[low] if low < len(SIZES) else None,
        caught_by="engine = definition" if low else None,
        named=named,
    )


def _first_wrong(numbers: Numbers, ran: Ran, injection: Injection) -> Place | None:
    layer = injection.place.layer
    layers = [] if layer is None else [layer, layer + 1]
    judgement = numbers.judge.judge([ran.requests], [], numbers.bands or Judgement(), layers)
    wrong = judgement.first_wrong()
    if wrong is None:
        return None
    off = wrong.off
    return Place(
        layer=None if off.part == "head" else off.layer, part=off.part, position=wrong.position
    )


# -- places ----------------------------------------------------------------------------


class _Noisy:
    """A part of a layer whose output has noise, relative to each row's norm."""

    def __init__(self, inner: Any, size: float, decode_only: bool) -> None:
        self._inner, self._size, self._decode_only = inner, size, decode_only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, x: Any, *given: Any) -> Any:
        made = self._inner.forward(x, *given)
        if self._decode_only and len(x) > 1:
            return made
        if isinstance(made, tuple):
            return (noisy(made[0], self._size), *made[1:])
        return noisy(made, self._size)


def noisy(x: Tensor, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(x.shape[-1], generator=generator, dtype=torch.float64)
    noise = (noise / noise.norm()).to(x.device)
    wide = x.double()
    changed: Tensor = wide + size * wide.norm(dim=-1, keepdim=True) * noise
    return changed.to(x.dtype)


def _changed(owner: Any, name: str, value: object) -> Callable[[], None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, original)


def _on_output(layer: int, part: str, *, decode_only: bool = False) -> Put:
    def put(decoder: Decoder, size: float) -> Callable[[], None]:
        at = decoder.layers[layer]
        return _changed(at, part, _Noisy(getattr(at, part), size, decode_only))

    return put


def _scaled(layer: int, name: str) -> Put:
    def put(decoder: Decoder, size: float) -> Callable[[], None]:
        mixer: Any = decoder.layers[layer].mixer
        weight: Tensor = getattr(mixer, name)
        return _changed(mixer, name, (weight.double() * (1 + size)).to(weight.dtype))

    return put


def _noisy_weights(layer: int, name: str) -> Put:
    def put(decoder: Decoder, size: float) -> Callable[[], None]:
        mixer = decoder.layers[layer].mixer
        return _changed(mixer, name, noisy(getattr(mixer, name), size))

    return put


def _on_norm(layer: int) -> Put:
    def put(decoder: Decoder, size: float) -> Callable[[], None]:
        at = decoder.layers[layer]
        entry = replace(at.before_mixer, norm=noisy(at.before_mixer.norm, size))
        return _changed(at, "before_mixer", entry)

    return put


def _on_last_norm(decoder: Decoder, size: float) -> Callable[[], None]:
    return _changed(decoder, "norm", noisy(decoder.norm, size))
