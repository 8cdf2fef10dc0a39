"""For pytest in a child: that an example fails is enough, nobody reads the smallest one."""

from __future__ import annotations

from hypothesis import Phase, settings


def pytest_sessionstart() -> None:
    """After conftest.py has chosen its profile, before tests are collected."""
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("unshrunk", settings(), phases=phases)
    settings.load_profile("unshrunk")
