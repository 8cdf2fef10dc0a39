"""A whole model: its layers, its vocabulary, and how its checkpoint is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trueline.spec.feedforward import FeedForwardSpec
from trueline.spec.mixer import MixerSpec
from trueline.spec.source import Span, Spec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class WeightStorage(Spec):
    """How a checkpoint stores its quantised weights. `weights/formats/` has those we can load."""

    label: ClassVar[str]
    """What reports call it."""


@dataclass(frozen=True, kw_only=True)
class UnsupportedStorage(WeightStorage):
    """A weight format that `inspect` can name and the loader refuses by that name."""

    label = "not loadable yet"

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class LayerSpec(Spec):
    index: int
    mixer: MixerSpec
    feed_forward: FeedForwardSpec


@dataclass(frozen=True, kw_only=True)
class HyperConnectionsSpec(Spec):
    """DeepSeek-V4's residual: `streams` of the hidden size, mixed before each mixer and each
    feed-forward, and weighted into one before the final norm. How they mix is a matrix made doubly
    stochastic by Sinkhorn's iterations (softmax over rows and a division by columns is the first),
    in float32."""

    streams: int
    iterations: int
    eps: float
    """Added to weights and to the sums that divide them."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    family: str
    hidden_size: int
    vocab: Span
    norm_eps: float
    """Of the norms before mixer and feed-forward, and of the final norm."""
    max_position: int
    tied_embeddings: bool
    dtype: str
    mtp_layers: int
    """Draft layers the checkpoint may hold after the last layer; unused so far."""
    drafting_keys: tuple[str, ...] = ()
    """Keys of the config that say how its draft layers draft; unused so far."""
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerSpec, ...]
    outputs: Span | None = None
    """The hidden channels that this rank's projections back to them make, from all heads and the
    whole width. None: all channels, but a part of each sum, for the ranks to add up."""
    hyper_connections: HyperConnectionsSpec | None = None
    """None: one residual stream, to which each mixer and feed-forward adds."""
    norm_head: bool = False
    """Whether each column of lm_head is divided by its length over the whole vocabulary."""
    storage: WeightStorage | None = None
    """None: plain float."""
    renamed: tuple[tuple[str, str], ...] = ()
    """What its files call parameters that others share: (part of our name, of theirs), each in
    turn."""
    refused_inputs: tuple[str, ...] = ()
    """Inputs the checkpoint could take and this engine refuses by name."""
    not_runnable: str | None = None
    """Why the engine cannot run it yet; None when it can."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)
