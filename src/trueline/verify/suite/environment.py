"""Where a run took place, and on what: for the report."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from math import prod
from pathlib import Path

import torch

from trueline import __version__
from trueline.device import compiler
from trueline.models.parameters import parameters
from trueline.verify.report import Environment, Model
from trueline.verify.suite.session import Session

MOST_HEADER = 1 << 20
"""Bytes of a checkpoint file that the fingerprint takes: its header, in most."""


def environment(session: Session) -> Environment:
    gpu = driver = None
    if session.plan.device.is_gpu:
        gpu, driver = torch.cuda.get_device_name(), _driver()
    return Environment(
        trueline=__version__,
        commit=_commit(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        platform=platform.platform(),
        cpu=_cpu(),
        threads=session.plan.threads,
        native=f"{session.plan.device.name}, {compiler()}" if compiler() else "off",
        gpu=gpu,
        driver=driver,
    )


def fingerprint(model: Path) -> str:
    digest = hashlib.blake2b((model / "config.json").read_bytes(), digest_size=16)
    for file in _files(model):
        with file.open("rb") as opened:
            digest.update(opened.read(MOST_HEADER))
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def model(session: Session) -> Model:
    spec, plan = session.spec, session.plan
    return Model(
        name=session.name,
        family=spec.family,
        dtype=str(plan.compute_dtype).removeprefix("torch."),
        layers=spec.num_layers,
        parameters=_parameters(session),
        bytes=sum(file.stat().st_size for file in _files(session.model)),
        fingerprint=fingerprint(session.model),
    )


def _parameters(session: Session) -> int:
    return sum(prod(piece.shape) for each in parameters(session.spec) for piece in each.pieces)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of a checkout; None where the package is installed."""
    root = Path(__file__).resolve().parents[4]
    if not (root / ".git").exists():
        return None
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} × {names[0]}" if names else platform.processor()


def _driver() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip().splitlines()[0] if found.stdout.strip() else None
