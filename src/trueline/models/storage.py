"""How a checkpoint is stored: the table of formats by `quant_method`, and who reads a config's."""

from __future__ import annotations

from trueline.plugins import Registry
from trueline.spec.fields import Fields
from trueline.spec.model import UnsupportedStorage, WeightStorage
from trueline.spec.source import Fact, Source, default

# Where they are, as text: a format reads tensors too, and so stands above the readers of configs.
# Plain float (weights/formats/dense.py) has no quantization_config that could name it.
REGISTRY = Registry(
    "trueline.formats",
    "format",
    {"quant_method.fp8": "trueline.weights.formats.block_fp8"},
    {"quant_method": ("read",)},
)


def read_storage(fields: Fields) -> Fact[WeightStorage | None]:
    """The format reads its own keys; those that nobody can load yet are named, not guessed."""
    section = fields.section("quantization_config", accepts="the keys of its quant_method")
    if section is None:
        return default(None, "no quantization_config: plain float")
    source = Source("key", section.prefix.removesuffix("."))
    method = section.name("quant_method")
    if method.value in REGISTRY.names("quant_method"):
        storage: WeightStorage = REGISTRY.get("quant_method", method.value).read(section)
        return Fact(storage, source)
    fmt = section.raw.get("format")
    name = f"{method.value} ({fmt})" if fmt else method.value
    return Fact(unsupported(name, method.source.text), source)


def unsupported(name: str, key: str) -> UnsupportedStorage:
    known = ", ".join(REGISTRY.names("quant_method"))
    return UnsupportedStorage(
        name=name,
        why=f"only plain float and these quant_methods can be loaded: {known}",
        sources={"name": Source("key", key)},
    )
