"""Trueline: inference for latent, linear and sparse attention models, with proof."""

__version__ = "0.1.0"
