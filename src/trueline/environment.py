"""What the environment says. Only this file and device.py read it; no torch."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where compiled kernels are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "trueline"


def environment_key() -> str | None:
    """The API key of the server that runs here."""
    return os.environ.get("TRUELINE_API_KEY") or None


def environment_setting(name: str) -> str | None:
    """Of an option: --max-num-seqs is TRUELINE_MAX_NUM_SEQS."""
    return os.environ.get(f"TRUELINE_{name.upper()}")


def hub_cache() -> Path:
    """Where Hugging Face's tools put models."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
