"""Choices of experts and keys, recorded and taken instead of choosing: so that two engines'
logprobs can be compared without near-ties deciding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.engine.loading import load_engine
from trueline.errors import UsageError
from trueline.layers.context import RecordedChoices
from trueline.llm import engine_config
from trueline.models import read_model
from trueline.reference import ENDS
from trueline.reference.model import FEED, MIX
from trueline.spec.feedforward import MoESpec
from trueline.spec.mixer import CompressedSpec, MLASpec
from trueline.spec.model import ModelSpec
from trueline.utils.hub import find_model
from trueline.verify.engine import Ask, request_of
from trueline.verify.failed import CheckFailed
from trueline.verify.suite.choices import all_visible
from trueline.verify.suite.definition import EXACT, Definition

Given = Mapping[int, Tensor] | Tensor


@dataclass(frozen=True)
class Choices:
    """What a model has chosen at each position of a sequence, and what came of it."""

    tokens: list[int]
    experts: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> ids [tokens, top_k]."""
    selected: dict[int, Tensor] = field(default_factory=dict)
    """Layer with an indexer of its own -> keys or entries [tokens, topk], −1 where there are
    fewer."""
    logprobs: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Of tokens[1:], float64."""

    def stacked(self, what: str = "experts") -> Tensor:
        """[tokens, layers, chosen], as `logprob_mismatch` takes it: `experts` or `selected`."""
        found: dict[int, Tensor] = getattr(self, what)
        return torch.stack([found[layer] for layer in sorted(found)], dim=1)


@dataclass(frozen=True)
class _Chooser:
    """A layer with an indexer of its own."""

    layer: int
    topk: int
    ratio: int
    """Positions of what it chooses among."""

    def chooses(self, position: int) -> bool:
        return (position + 1) // self.ratio > self.topk


def recorded_choices(model: str | Path, tokens: Sequence[int], **options: Any) -> Choices:
    """The engine's own choices at each position of `tokens`, computed as prefill. `options` are the
    engine's, as `LLM` takes them."""
    directory, config = find_model(model), _config(options, len(tokens))
    spec = read_model(directory, config.facts)
    with _core(directory, config, spec, tokens) as core:
        runner = local_runner(core.executor)
        steps: list[RecordedChoices] = []
        runner.recorded = steps
        logprobs = _logprobs(core, tokens)
    experts: dict[int, Tensor] = {}
    for layer in _expert_layers(spec):
        experts[layer] = torch.cat([step.experts[layer].cpu().long() for step in steps])
    selected: dict[int, Tensor] = {}
    for number, chooser in enumerate(_choosers(spec)):
        rows = [row for step in steps if step.positions for row in step.positions[number].cpu()]
        at = [p for p in range(len(tokens)) if chooser.chooses(p)]
        chosen = dict(zip(at, rows, strict=True))
        made = all_visible(len(tokens), chooser.topk, chooser.ratio, chosen)
        selected[chooser.layer] = made
    return Choices(list(tokens), experts, selected, logprobs)


def replayed_logprobs(
    model: str | Path,
    tokens: Sequence[int],
    *,
    experts: Given | None = None,
    selected: Given | None = None,
    definition: bool = False,
    **options: Any,
) -> Tensor:
    """Logprobs of tokens[1:], float64, with recorded choices taken instead of choosing: the
    engine's, or those of the float64 definition. `experts` [tokens, chosen] by layer, or [tokens,
    layers, chosen] of all layers with experts in their order, as rollout engines return them;
    `selected` likewise, of layers with an indexer of their own. A row for the last token may be
    missing: no logprob comes of it."""
    directory, config = find_model(model), _config(options, len(tokens))
    spec = read_model(directory, config.facts)
    count, layers = len(tokens), _expert_layers(spec)
    ids = _by_layer("experts", experts, list(layers), count)
    for layer, rows in ids.items():
        _require_ids(f"experts of layer {layer}", rows, layers[layer])
    choosers = {each.layer: each for each in _choosers(spec)}
    keys = _by_layer("selected", selected, list(choosers), count)
    if keys.keys() not in ({}.keys(), choosers.keys()):
        raise UsageError(
            f"selected: layers {sorted(keys)}; accepted: none, or all with an indexer of their own "
            f"({sorted(choosers)})"
        )
    if definition:
        return _of_definition(directory, config, list(tokens), ids, keys)
    with _core(directory, config, spec, tokens) as core:
        most = core.plan.limits.max_num_batched_tokens
        local_runner(core.executor).forced = [
            _step(range(start, min(start + most, count)), ids, keys, choosers)
            for start in range(0, count, most)
        ]
        return _logprobs(core, tokens)


# -- choices ---------------------------------------------------------------------------


def _expert_layers(spec: ModelSpec) -> dict[int, tuple[int, int]]:
    """Experts, and how many are chosen, of each layer that has some."""
    return {
        layer.index: (layer.feed_forward.experts.total, layer.feed_forward.router.top_k)
        for layer in spec.layers
        if isinstance(layer.feed_forward, MoESpec)
    }


def _choosers(spec: ModelSpec) -> Iterator[_Chooser]:
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, MLASpec) and mixer.indexer is not None and not mixer.indexer.shared:
            yield _Chooser(layer.index, mixer.indexer.topk, 1)
        elif isinstance(mixer, CompressedSpec) and mixer.indexer is not None:
            assert mixer.compressor is not None, "it chooses among entries"
            yield _Chooser(layer.index, mixer.indexer.topk, mixer.compressor.ratio)


def _by_layer(what: str, given: Given | None, layers: list[int], count: int) -> dict[int, Tensor]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        whole = torch.as_tensor(given)
        if whole.dim() != 3 or whole.shape[1] != len(layers):
            raise UsageError(
                f"{what}: {list(whole.shape)}; accepted: [tokens, {len(layers)} layers, chosen]"
            )
        given = {layer: whole[:, i] for i, layer in enumerate(layers)}
    found: dict[int, Tensor] = {}
    for layer, given_rows in given.items():
        rows = torch.as_tensor(given_rows).long().cpu()
        if layer not in layers:
            raise UsageError(f"{what}: layer {layer} chooses nothing; accepted: {layers}")
        if rows.dim() != 2 or len(rows) not in (count, count - 1):
            raise UsageError(
                f"{what} of layer {layer}: {list(rows.shape)}; accepted: [{count} or {count - 1} "
                "tokens, chosen]"
            )
        found[layer] = rows if len(rows) == count else torch.cat([rows, rows[-1:]])
    return found


def _require_ids(what: str, rows: Tensor, accepted: tuple[int, int]) -> None:
    experts, top_k = accepted
    if rows.shape[1] != top_k or not 0 <= int(rows.min()) <= int(rows.max()) < experts:
        raise UsageError(f"{what}: accepted: {top_k} ids from 0 to {experts - 1} for each token")


def _step(
    positions: range,
    experts: Mapping[int, Tensor],
    selected: Mapping[int, Tensor],
    choosers: Mapping[int, _Chooser],
) -> RecordedChoices:
    """As a step of prefill over these positions would have recorded it."""
    made = RecordedChoices({layer: rows[list(positions)] for layer, rows in experts.items()})
    for layer in sorted(selected):
        chooser = choosers[layer]
        if at := [p for p in positions if chooser.chooses(p)]:
            made.positions.append(selected[layer][at][:, : chooser.topk])
    return made


# -- the engine and the definition -----------------------------------------------------


def _config(options: Mapping[str, Any], count: int) -> EngineConfig:
    if count < 2:
        raise UsageError(f"{count} tokens; accepted: 2 or more, since the first has no logprob")
    least = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "max_model_len": count + 1,
    }
    config = engine_config({**least, **options})
    if config.tensor_parallel_size > 1:
        raise UsageError("tensor_parallel_size: choices are recorded and forced on one rank")
    return config


@contextmanager
def _core(
    model: Path, config: EngineConfig, spec: ModelSpec, tokens: Sequence[int]
) -> Iterator[EngineCore]:
    vocab = spec.vocab.total
    if wrong := [token for token in tokens if not 0 <= token < vocab]:
        raise UsageError(f"token {wrong[0]}; accepted: 0 to {vocab - 1}")
    core = load_engine(model, config).core
    try:
        yield core
    finally:
        core.close()


def _logprobs(core: EngineCore, tokens: Sequence[int]) -> Tensor:
    core.add(request_of(0, Ask(list(tokens), 1, params={"prompt_logprobs": 0})))
    found: list[float] = []
    while core.has_unfinished():
        for output in core.step():
            if output.error:
                raise CheckFailed(f"the engine stopped: {output.error}")
            found += [score.logprob for score in output.prompt_scores]
    return torch.tensor(found, dtype=EXACT)


def _of_definition(
    model: Path,
    config: EngineConfig,
    tokens: list[int],
    experts: dict[int, Tensor],
    selected: dict[int, Tensor],
) -> Tensor:
    """One layer in memory at a time."""
    whole = Definition(model, EXACT, EXACT, facts=config.facts, room=0)
    sequence = whole.sequence(tokens, experts=experts, selected=selected)
    with torch.no_grad():
        h = whole.part(ENDS).start(torch.tensor(tokens))
        for layer in range(whole.num_layers):
            ref = whole.part(layer)
            h = ref.add(layer, MIX, h, ref.mixed(layer, ref.entry(layer, MIX, h), sequence))
            h = ref.add(layer, FEED, h, ref.fed(layer, ref.entry(layer, FEED, h), sequence))
        logprobs = whole.part(ENDS).head(h).log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
