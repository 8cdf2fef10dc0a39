"""The distribution's Chromium, which `make test-browser` drives. Run as a program it says which one
that is, or what is missing."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def find_chromium() -> str | None:
    named = os.environ.get("CHROMIUM")
    found = [shutil.which(name) for name in ((named,) if named else NAMES)]
    return next(filter(None, found), None)


def missing() -> str | None:
    """What a test in a browser lacks here, and how to get it; None: nothing."""
    if find_spec("playwright") is None:
        return "no playwright: make test-browser installs it"
    if find_chromium() is None:
        return (
            "no Chromium: apt-get install chromium (Debian), dnf install chromium (Fedora), or "
            "CHROMIUM=/path/to/one; then make test-browser"
        )
    return None


if __name__ == "__main__":
    if problem := missing():
        sys.exit(problem)
    print(find_chromium())
