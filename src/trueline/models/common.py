"""Readers for the keys that families share: rope in all its spellings, widths, dtype, tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeGuard, TypeVar

from trueline.errors import ConfigError
from trueline.models.harmless import HARMLESS, INERT_AT
from trueline.spec.fields import Fields, is_number
from trueline.spec.model import DTYPE_BYTES
from trueline.spec.rope import RopeSpec, YarnSpec
from trueline.spec.source import Fact, Source, Span, default, formula

T = TypeVar("T")

MAX_LAYERS = 1024
MAX_EXPERTS = 4096
ROPE_KEYS = "the keys of rope types default and yarn"


def read_rope(
    fields: Fields, *, dim: Fact[int], pairing: Fact[str], max_position: Fact[int]
) -> RopeSpec:
    """The rope of a model whose layers all rotate alike."""
    section = rope_section(fields)
    for place in filter(None, (fields, section)):
        place.must_equal(
            "partial_rotary_factor", 1.0, "latent attention rotates all of qk_rope_head_dim"
        )
    return RopeSpec.of(dim=dim, pairing=pairing, **read_shared_rope(fields, section, max_position))


def read_shared_rope(
    fields: Fields, section: Fields | None, max_position: Fact[int]
) -> dict[str, object]:
    """What all ropes of a model share, whatever they rotate: base, and YaRN or not. `rope_theta`
    may stand inside the section or beside it."""
    if section is None:
        yarn: Fact[YarnSpec | None] = default(None, "neither rope_scaling nor rope_parameters")
        base = _rope_base(fields, None)
    else:
        base = _rope_base(fields, section)
        yarn = read_yarn(section, max_position)
        section.finish({})
    return {"base": base, "yarn": yarn, "yarn_scales_magnitude": True}


def rope_section(fields: Fields) -> Fields | None:
    """`rope_scaling` or `rope_parameters`, whichever is there; None for neither."""
    new = fields.section("rope_parameters", accepts=ROPE_KEYS)
    old = fields.section("rope_scaling", accepts=ROPE_KEYS)
    if new and old and new.raw != old.raw:
        fields.refuse("rope_scaling", "the same as 'rope_parameters', or only one of the two")
    return new or old


def _rope_base(fields: Fields, section: Fields | None) -> Fact[float]:
    """One base, even if the file states it twice."""
    inside = section.number("rope_theta", above=1.0) if section and _holds_theta(section) else None
    if inside is None:
        return fields.number("rope_theta", above=1.0)
    if fields.has("rope_theta"):
        fields.must_equal("rope_theta", section.raw["rope_theta"] if section else None, "one base")
    return inside


def _holds_theta(section: Fields) -> bool:
    return "rope_theta" in section.raw


def read_yarn(section: Fields, max_position: Fact[int]) -> Fact[YarnSpec | None]:
    """YaRN's parameters, or None for the default type; any other type is refused."""
    kind = section.choice("rope_type", ("default", "yarn"), aliases=("type",))
    if kind.value == "default":
        return Fact(None, kind.source)
    paper = "YaRN's own default"
    original = default(
        max_position.value, "max_position_embeddings, as transformers takes it when absent"
    )
    spec = YarnSpec.of(
        factor=section.number("factor", minimum=1.0, maximum=1e6),
        original_max_position=section.integer("original_max_position_embeddings", default=original),
        beta_fast=section.number("beta_fast", default=default(32.0, paper)),
        beta_slow=section.number("beta_slow", default=default(1.0, paper)),
        truncate=section.boolean("truncate", default=default(True, paper)),
        mscale=section.number("mscale", minimum=0.0, default=default(0.0, "unused")),
        mscale_all_dim=section.number(
            "mscale_all_dim", minimum=0.0, default=default(0.0, "no mscale²")
        ),
        attention_factor=_attention_factor(section),
        apply_yarn_scaling=section.boolean(
            "apply_yarn_scaling", default=default(True, "mscale² applies")
        ),
    )
    if spec.beta_fast < spec.beta_slow:
        section.refuse("beta_fast", f"a number from beta_slow = {spec.beta_slow:g} up")
    return Fact(spec, kind.source)


def _attention_factor(section: Fields) -> Fact[float | None]:
    if section.has("attention_factor"):
        return section.number("attention_factor")
    return default(None, "follows from mscale and mscale_all_dim")


def whole(total: Fact[int]) -> Fact[Span]:
    return Fact(Span.whole(total.value), total.source)


def read_shared_width(
    fields: Fields, width: Fact[int], key: str = "n_shared_experts"
) -> Fact[Span | None]:
    """The shared experts act as one MLP; `width` is that of one of them."""
    count = fields.integer_or_null(key, minimum=0).value
    return formula(
        Span.whole(width.value * count) if count else None, f"{width.source.text} × {key}"
    )


def read_layer_types(
    fields: Fields, key: str, accepted: Iterable[str], num_layers: int
) -> Fact[tuple[str, ...]]:
    names = tuple(accepted)

    def is_type(value: object) -> TypeGuard[str]:
        return isinstance(value, str) and value in names

    return fields.list_of(key, is_type, " or ".join(names), length=num_layers)


def read_dtype(fields: Fields) -> Fact[str]:
    return fields.choice(
        "dtype",
        DTYPE_BYTES,
        aliases=("torch_dtype",),
        default=default("float32", "transformers' default"),
    )


def read_token_ids(fields: Fields, key: str) -> Fact[tuple[int, ...]]:
    """One id, a list of ids, or null."""
    if not fields.has(key):
        return default((), "no end token in the config")

    def is_id(value: object) -> TypeGuard[int]:
        return type(value) is int and value >= 0

    if isinstance(fields.raw[key], list):
        return fields.list_of(key, is_id, "token ids", length=None)
    one = fields.integer(key, minimum=0)
    return Fact((one.value,), one.source)


def finish(fields: Fields) -> None:
    """Refuse what nobody read, after the keys that may have one value only."""
    for key, (value, why) in INERT_AT.items():
        fields.must_equal(key, value, why)
    fields.finish(HARMLESS)


def read_tied(fields: Fields) -> Fact[bool]:
    return fields.boolean("tie_word_embeddings", default=default(False, "untied in every release"))


def read_mtp_layers(fields: Fields) -> Fact[int]:
    return fields.integer(
        "num_nextn_predict_layers",
        minimum=0,
        maximum=MAX_LAYERS,
        aliases=("num_mtp_layers",),
        default=default(0, "no draft layers"),
    )


def check_architectures(fields: Fields, accepted: tuple[str, ...]) -> None:
    if not fields.has("architectures"):
        return
    names = fields.raw["architectures"]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in accepted:
        fields.refuse("architectures", " or ".join(f'["{name}"]' for name in accepted))


def read_override(
    overrides: dict[str, object], name: str, fallback: Fact[float], limit: float
) -> Fact[float]:
    """A documented fact that the user may state instead: `facts={"latent_norm_eps": 1e-5}`."""

    def check(value: object) -> TypeGuard[float]:
        return is_number(value) and 0 < value <= limit

    fact = _overridden(overrides, name, fallback, check, f"a number in (0, {limit:g}]")
    return Fact(float(fact.value), fact.source)


def choose_override(
    overrides: dict[str, object], name: str, fallback: Fact[str], accepted: tuple[str, ...]
) -> Fact[str]:
    """The same for a fact that is one of several words."""
    words = " or ".join(f'"{word}"' for word in accepted)

    def check(value: object) -> TypeGuard[str]:
        return value in accepted

    return _overridden(overrides, name, fallback, check, words)


def _overridden(
    overrides: dict[str, object],
    name: str,
    fallback: Fact[T],
    check: Callable[[object], TypeGuard[T]],
    accepted: str,
) -> Fact[T]:
    if name not in overrides:
        return fallback
    value = overrides.pop(name)
    if not check(value):
        raise ConfigError(f"fact '{name}': found {value!r}; accepted: {accepted}")
    return Fact(value, Source("override", f"facts={{'{name}': …}}"))
