"""Steps of a loaded model without data: its layers over PyTorch's meta device, whose tensors have
shapes, strides and offsets, and nothing to compute. Every kernel is asked for as a real step of the
same shape would ask for it, in milliseconds and in no memory of the GPU."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from trueline.device import META
from trueline.engine.memory import made_up_batch
from trueline.engine.params import SamplingParams
from trueline.engine.runner import Runner
from trueline.grammar.vocabulary import mask_words
from trueline.layers.decoder import Decoder
from trueline.ops.launch import KNOWN_MULTIPLE
from trueline.ops.sampling import SamplingState, TokenMask, build_rows
from trueline.plan.plan import Plan
from trueline.spec.model import ModelSpec

Rows = Sequence[tuple[int, int]]
"""(start, count) of each row of a step, decode rows first: those with history and one token."""


class DryRun:
    def __init__(self, spec: ModelSpec, plan: Plan, decoder: Decoder) -> None:
        kept = _different(spec, decoder)
        self.plan = plan = replace(plan, device=replace(plan.device, kind=META), canaries=None)
        spec = replace(spec, layers=tuple(spec.layers[i] for i in kept))
        plan = plan.of_layers(kept)
        self.runner = Runner(spec, plan, _without_data(decoder, kept), _once)

    @torch.inference_mode()
    def forward(self, rows: Rows) -> None:
        runner = self.runner
        batch = made_up_batch(self.plan, rows)
        step = runner.inputs.build(batch, runner.inputs.tensor(batch.tokens))
        hidden = runner.decoder.hidden(step, runner.caches.views)
        runner.decoder.logits(hidden[: self.plan.limits.max_num_seqs])

    @torch.inference_mode()
    def sample(self, count: int, params: SamplingParams, *, masked: bool = False) -> None:
        """`masked`: by grammars."""
        states = [
            SamplingState(
                params=params, prompt_ids=[0], output_ids=[], position=1, eos_ids=[], seed=seed
            )
            for seed in range(count)
        ]
        runner = self.runner
        logits = runner.decoder.logits(runner.decoder.embedding[:count].to(runner.decoder.compute))
        mask: TokenMask | None = None
        if masked:
            words = torch.empty(count, mask_words(runner.spec.vocab.total), dtype=torch.int32)
            mask = TokenMask.of_rows(tuple(range(count)), words.to(self.plan.device.torch))
        runner.sampling.sample(logits, build_rows(states, self.plan.device.torch, mask))

    def decode_graphs(self) -> None:
        if self.plan.graphs and self.runner.graphs is not None:
            self.runner.graphs.capture_all()


def _once(step: Callable[[], object]) -> Callable[[], object]:
    """In place of capturing."""
    step()
    return step


class Outline(pickle.Pickler):
    """An object down to its atoms: tensors, modules and functions."""

    def __init__(self, thing: object) -> None:
        self.atoms: list[Tensor | ModuleType | FunctionType] = []
        self._bytes = io.BytesIO()
        super().__init__(self._bytes)
        self.dump(thing)

    def persistent_id(self, thing: object) -> str | None:
        if not isinstance(thing, (Tensor, ModuleType, FunctionType)):
            return None
        self.atoms.append(thing)
        return str(len(self.atoms) - 1)

    def tensors(self) -> list[tuple[object, ...]]:
        """What kernels are compiled for."""
        return [
            (x.dtype, x.shape, x.stride(), x.data_ptr() % KNOWN_MULTIPLE)
            for x in self.atoms
            if isinstance(x, Tensor)
        ]

    def digest(self) -> bytes:
        """Of everything but data."""
        others = [
            x.__qualname__ if isinstance(x, FunctionType) else x.__name__
            for x in self.atoms
            if not isinstance(x, Tensor)
        ]
        return hashlib.blake2b(
            self._bytes.getvalue() + repr((self.tensors(), others)).encode()
        ).digest()

    def without_data(self) -> Any:
        reader = pickle.Unpickler(io.BytesIO(self._bytes.getvalue()))
        made = [_like(atom) if isinstance(atom, Tensor) else atom for atom in self.atoms]
        reader.persistent_load = lambda name: made[int(name)]  # type: ignore[method-assign]
        return reader.load()


def _like(x: Tensor) -> Tensor:
    """No data, the same strides, and the same alignment."""
    offset = x.data_ptr() % KNOWN_MULTIPLE // x.itemsize
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    raw = torch.empty(offset + max(span, 0), dtype=x.dtype, device=META)
    return raw.as_strided(x.shape, x.stride(), offset)


def _different(spec: ModelSpec, decoder: Decoder) -> list[int]:
    """One layer of each kind; two at least, since the first has nothing before it to add."""
    tensors = [Outline(layer).tensors() for layer in decoder.layers]
    kept: list[int] = []
    for i, layer in enumerate(spec.layers):
        same = (
            tensors[i] == tensors[j]
            and layer.mixer.same_kind(spec.layers[j].mixer)
            and layer.feed_forward.same_kind(spec.layers[j].feed_forward)
            for j in kept
        )
        if i < 2 or not any(same):
            kept.append(i)
    return kept


def _without_data(decoder: Decoder, layers: list[int]) -> Decoder:
    part = copy(decoder)
    part.layers = [decoder.layers[i] for i in layers]
    part.ropes = copy(decoder.ropes)
    part.ropes.of_layer = [decoder.ropes.of_layer[i] for i in layers]
    made: Decoder = Outline(part).without_data()
    return made
