"""The families of tiny checkpoints that the engine runs."""

from __future__ import annotations

from pathlib import Path

from trueline.models import find_family
from trueline.spec.fields import Fields
from trueline.tiny.configs import FAMILIES, family_config


def _runs(family: str) -> bool:
    fields = Fields(family_config(family), Path("config.json"))
    return find_family(fields).read(fields, {}).not_runnable is None


RUNNABLE = tuple(filter(_runs, FAMILIES))
