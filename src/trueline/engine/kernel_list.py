"""The kernels that warm-up asked for, listed beside Triton's compiled ones: the next start of the
same model asks for them again without a single dry step, nor the modules that those import."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

import trueline
from trueline.engine.dry_run import Outline
from trueline.engine.late_kernels import LOG
from trueline.layers.decoder import Decoder
from trueline.ops.registry import OPS
from trueline.plan.plan import Plan
from trueline.plan.select import OWN
from trueline.spec.model import ModelSpec


class KernelList:
    """Of one model, plan, GPU and version of the code."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._kernels: list[dict[str, str]] = []

    @classmethod
    def of(cls, spec: ModelSpec, plan: Plan, decoder: Decoder) -> KernelList | None:
        """None where an op or a layer is another package's: its code is not in the digest."""
        every = (plan.selections, *plan.by_format.values())
        chosen = [pair for each in every for pair in each.items()]
        if any(choice.name not in OPS[op] for op, choice in chosen) or any(
            choice.name != OWN for choice in plan.layers.values()
        ):
            return None
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted(Path(trueline.__file__).parent.rglob("*.py")):
            digest.update(file.read_bytes())
        # Nothing that depends on how much memory happens to be free.
        kept = (
            *(torch.__version__, triton.__version__, torch.cuda.get_device_properties().name),
            *(spec, plan.limits, plan.selections, plan.by_format),
            *(plan.weight_dtype, plan.compute_dtype),
            *(plan.kinds, plan.max_model_len, plan.tiling, plan.batch_invariant, plan.graphs),
        )
        digest.update(repr(kept).encode())
        digest.update(Outline(decoder).digest())
        return cls(Path(knobs.cache.dir) / f"trueline-{digest.hexdigest()}.json")

    def ask(self) -> bool:
        """For every kernel listed; False if there is no list, or none that this Triton takes."""
        try:
            kernels = json.loads(self.file.read_text())
            for kernel in kernels:
                _find(kernel["module"], kernel["name"]).preload(kernel["arguments"])
        except FileNotFoundError:
            return False
        except Exception as error:  # written by whom? warm-up as at the first start
            LOG.warning("%s: not used: %r", self.file, error)
            return False
        return bool(kernels)

    def record(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        """Triton's hook before each compilation. Their order stays: on it depends under which key
        Triton keeps a kernel whose functions read globals."""
        arguments = compile["specialization_data"]
        self._kernels.append({"module": fn.module, "name": fn.name, "arguments": arguments})

    def write(self) -> None:
        """At once: other processes may be reading."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, delete=False) as made:
                json.dump(self._kernels, made)
            os.replace(made.name, self.file)
        except OSError as error:
            LOG.warning("%s: not written: %s", self.file, error)


def _find(module: str, name: str) -> Any:
    """Of a name in a module: what Triton made of it."""
    found = getattr(import_module(module), name)
    return getattr(found, "made", found)
