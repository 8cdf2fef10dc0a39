"""Tells systemd how the server is (Type=notify); without systemd, nobody."""

from __future__ import annotations

import socket
from contextlib import suppress

from trueline.utils.environment import notify_socket


def notify(state: str) -> None:
    """READY=1, STOPPING=1, STATUS=…; several on lines of their own."""
    name = notify_socket()
    if name is None:
        return
    address = "\0" + name[1:] if name.startswith("@") else name
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.sendto(state.encode(), address)
