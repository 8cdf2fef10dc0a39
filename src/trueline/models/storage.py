"""How a checkpoint is stored: the tables of formats by `quant_method` and, where a config says how
its routed experts are stored beside fp8, by `expert_dtype`; and who reads a config's."""

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
    {
        "quant_method.fp8": "trueline.weights.formats.block_fp8",
        "quant_method.compressed-tensors": "trueline.weights.formats.pack_int4",
        "expert_dtype.fp8": "trueline.weights.formats.base_fp8",
        "expert_dtype.fp4": "trueline.weights.formats.fp4",
    },
    {"quant_method": ("read",), "expert_dtype": ("read",)},
)


def read_storage(fields: Fields) -> Fact[WeightStorage | None]:
    """The format reads its own keys; those that nobody can load yet are named, not guessed."""
    section = fields.section("quantization_config", accepts="the keys of its quant_method")
    if section is None:
        return default(None, "no quantization_config: plain float")
    source = Source("key", section.prefix.removesuffix("."))
    method = section.name("quant_method")
    experts = _read_expert_dtype(fields, section) if method.value == "fp8" else None
    if experts is not None:
        return Fact(REGISTRY.get("expert_dtype", experts.value).read(section), experts.source)
    if method.value in REGISTRY.names("quant_method"):
        storage: WeightStorage = REGISTRY.get("quant_method", method.value).read(section)
        return Fact(storage, source)
    fmt = section.raw.get("format")
    name = f"{method.value} ({fmt})" if fmt else method.value
    return Fact(_unsupported(name, method.source.text), source)


def _read_expert_dtype(fields: Fields, section: Fields) -> Fact[str] | None:
    """DeepSeek-V4's key, which stands beside quantization_config or inside of it."""
    names = REGISTRY.names("expert_dtype")
    stated = [
        each.choice("expert_dtype", names) for each in (fields, section) if each.has("expert_dtype")
    ]
    if len({fact.value for fact in stated}) > 1:
        section.refuse("expert_dtype", f'"{stated[0].value}", as beside quantization_config')
    return stated[0] if stated else None


def _unsupported(name: str, key: str) -> UnsupportedStorage:
    known = ", ".join(REGISTRY.names("quant_method"))
    return UnsupportedStorage(
        name=name,
        why=f"only plain float and these quant_methods can be loaded: {known}",
        sources={"name": Source("key", key)},
    )
