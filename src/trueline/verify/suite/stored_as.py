"""Options that say how caches store what is computed, against what the caches of an engine are: the
definition follows the codes and scales that it finds there, and would follow another option's."""

from __future__ import annotations

from collections.abc import Iterator

from trueline.cache.layout import IndexLayout, LatentLayout
from trueline.config import EngineConfig
from trueline.plan.plan import Plan
from trueline.verify.failed import CheckFailed

USUAL_GROUP = 128
"""Channels of a scale where the options say nothing, as DeepSeek stores them (docs/engine.md)."""
ALSO = {"fp8": "e4m3fn", "fp8_e4m3": "e4m3fn"}
"""vLLM's names of a dtype."""


def require_stored_as_asked(plan: Plan, config: EngineConfig) -> None:
    for kind in plan.kinds:
        for option, asked, is_so in _answers(kind, plan, config):
            if asked != is_so:
                raise CheckFailed(
                    f"{option} = {getattr(config, option)!r} asks for {asked} in the cache of "
                    f"{kind.name}, which has {is_so}"
                )


def _answers(
    kind: object, plan: Plan, config: EngineConfig
) -> Iterator[tuple[str, object, object]]:
    """Option, what it asks for, what is so."""
    computed = str(plan.compute_dtype).removeprefix("torch.")
    layout = getattr(kind, "layout", None)
    if isinstance(layout, LatentLayout):
        wanted, fp8 = config.kv_cache_dtype, layout.fp8
        asked = computed if wanted == "auto" else ALSO.get(wanted, wanted)
        yield "kv_cache_dtype", asked, computed if fp8 is None else fp8.storage
        if fp8 is not None:
            group = {"auto": USUAL_GROUP, "token": layout.latent}.get(
                str(config.kv_cache_group_size), config.kv_cache_group_size
            )
            yield "kv_cache_group_size", group, fp8.group
            scales = "powers of two" if config.kv_cache_scale_fmt == "ue8m0" else "any scales"
            found = "powers of two" if fp8.power_of_two else "any scales"
            yield "kv_cache_scale_fmt", scales, found
    if isinstance(layout, IndexLayout):
        wanted, form = config.index_cache_dtype, config.index_cache_layout
        yield "index_cache_dtype", computed if wanted == "auto" else wanted, layout.storage
        yield "index_cache_layout", "rows" if form == "auto" else form, layout.kind
    if getattr(kind, "name", "") == "lightning":
        wanted = config.mamba_cache_dtype
        asked = str(plan.weight_dtype if wanted == "auto" else wanted).removeprefix("torch.")
        yield "mamba_cache_dtype", asked, str(getattr(kind, "dtype", "")).removeprefix("torch.")
