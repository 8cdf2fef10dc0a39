"""Trueline: inference for latent, linear and sparse attention models, with proof."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from trueline.utils.environment import calm_openmp

if TYPE_CHECKING:
    from trueline.engine.params import SamplingParams
    from trueline.grammar.structured import StructuredOutputsParams
    from trueline.llm import LLM, LLMEngine
    from trueline.outputs import CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"

calm_openmp()

# Looked up when first used, so that `trueline --version` imports no torch.
_HOMES = {
    "LLM": "trueline.llm",
    "LLMEngine": "trueline.llm",
    "SamplingParams": "trueline.engine.params",
    "StructuredOutputsParams": "trueline.grammar.structured",
    "RequestOutput": "trueline.outputs",
    "CompletionOutput": "trueline.outputs",
    "Logprob": "trueline.outputs",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trueline' has no attribute '{name}'")
