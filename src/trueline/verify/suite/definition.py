"""The float64 definition and an independent evaluation in the model's dtype, layer by layer.

Weights that the user has asked to round (a float32 checkpoint in bfloat16) are rounded for both:
what is checked is what the engine makes of them. Quantised ones are exactly what they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueline import reference
from trueline.reference import ENDS, Reference, read_config
from trueline.reference.model import Sequence
from trueline.reference.weights import dtype_of, stored_dtypes
from trueline.utils.json_types import JSON

EXACT = torch.float64
EMBEDDING = "model.embed_tokens.weight"
Part = int | str | tuple[str, ...]
"""Weights of a layer, ENDS, or those whose names begin so."""
# Divided by heads or groups and transposed, so kept dequantised, in the dtype of plain weights.
TRANSPOSED = re.compile(r"\.(kv_b_proj|o_a_proj)\.weight$")
# Decides which experts run: never rounded.
ROUTER = re.compile(r"\.mlp\.gate\.")


class Definition:
    """`dtype` is what the engine computes in, `stored` what plain weights are kept in. `room`:
    bytes of layers that stay in memory beside the one that is read last; None: all of them."""

    def __init__(
        self,
        model: Path,
        dtype: torch.dtype,
        stored: torch.dtype,
        numerics: str = "weights",
        facts: Mapping[str, Any] | None = None,
        device: str = "cpu",
        *,
        room: int | None = None,
    ) -> None:
        self.model, self.dtype, self.stored, self.numerics = model, dtype, stored, numerics
        self.facts: JSON = dict(facts or {})
        self.device, self.room = torch.device(device), room
        self.config = read_config(model, **self.facts)
        self._parts: dict[tuple[Part, torch.dtype], Reference] = {}

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    def part(self, part: Part, dtype: torch.dtype = EXACT) -> Reference:
        """Ready for `there()`."""
        if (part, dtype) not in self._parts:
            self._make_room(part)
            with self.there():
                made = reference.load(
                    self.model, dtype, self.numerics, part, self.device, **self.facts
                )
                for name, tensor in made.params.items():
                    made.params[name] = self._rounded(name, tensor)
            self._parts[part, dtype] = made
        return self._parts[part, dtype]

    def _make_room(self, part: Part) -> None:
        """Of layers, what was read first goes first; never that one, nor ENDS."""
        if self.room is None:
            return
        held = {
            key: sum(tensor.nbytes for tensor in made.params.values())
            for key, made in self._parts.items()
            if key[0] not in (part, ENDS)
        }
        while held and sum(held.values()) > self.room:
            oldest = next(iter(held))
            del held[oldest], self._parts[oldest]

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        if not (name in self._plain or TRANSPOSED.search(name)) or ROUTER.search(name):
            return tensor
        return tensor.to(dtype_of(name, self.stored)).to(tensor.dtype)

    @cached_property
    def _plain(self) -> set[str]:
        """Weights whose stored numbers are wider than what the engine keeps."""
        found = stored_dtypes(self.model, self.config)
        if self.config.tie_word_embeddings and EMBEDDING in found:
            found["lm_head.weight"] = found[EMBEDDING]
        return {name for name, dtype in found.items() if dtype.itemsize > self.stored.itemsize}

    def there(self) -> AbstractContextManager[Any]:
        """Where it computes: tensors made meanwhile are on its device."""
        return self.device

    def sequence(
        self,
        tokens: list[int],
        *,
        form: str = "expanded",
        experts: Mapping[int, Tensor] | None = None,
        selected: Mapping[int, Tensor] | None = None,
    ) -> Sequence:
        ids = torch.tensor(tokens, device=self.device)
        places = torch.arange(len(tokens), device=self.device)
        selections = reference.Selections({}, selected or {})
        return Sequence(ids, places, form, {}, experts or {}, selections)
