"""Whether a model's numbers are right: what `trueline verify` and `trueline replay` do, for
programs; and for reinforcement learning, how far two engines' logprobs of the same tokens are
apart."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trueline.verify.library import verify
    from trueline.verify.mismatch import Mismatch, logprob_mismatch
    from trueline.verify.recorded import Choices, recorded_choices, replayed_logprobs
    from trueline.verify.replay.rerun import Replayed, replay_file
    from trueline.verify.report import Report

# Looked up when first used, so that importing the package imports no torch.
_HOMES = {
    "Choices": "trueline.verify.recorded",
    "Mismatch": "trueline.verify.mismatch",
    "Replayed": "trueline.verify.replay.rerun",
    "Report": "trueline.verify.report",
    "logprob_mismatch": "trueline.verify.mismatch",
    "recorded_choices": "trueline.verify.recorded",
    "replay_file": "trueline.verify.replay.rerun",
    "replayed_logprobs": "trueline.verify.recorded",
    "verify": "trueline.verify.library",
}
__all__ = [
    "Choices",
    "Mismatch",
    "Replayed",
    "Report",
    "logprob_mismatch",
    "recorded_choices",
    "replay_file",
    "replayed_logprobs",
    "verify",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trueline.verify' has no attribute '{name}'")
