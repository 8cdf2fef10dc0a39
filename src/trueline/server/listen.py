"""Where the server listens: an address and a port, or a Unix socket; and TLS."""

from __future__ import annotations

import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path

from trueline.errors import UsageError
from trueline.server.config import ServerConfig

BACKLOG = 2048


def listen(config: ServerConfig) -> socket.socket:
    listening = _unix(config.uds) if config.uds is not None else _tcp(config.host, config.port)
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening


def close(listening: socket.socket, config: ServerConfig) -> None:
    """A Unix socket's file goes too: nobody answers there any more."""
    listening.close()
    if config.uds is not None:
        with suppress(OSError):
            config.uds.unlink()


def url(listening: socket.socket, tls: bool) -> str:
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What cannot be read is told before a model is loaded."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = f"ssl_certfile {config.ssl_certfile}, ssl_keyfile {config.ssl_keyfile}"
    try:
        # without a password of ours OpenSSL would ask for one on the terminal
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
        if config.ssl_ca_certs is not None:
            files = f"ssl_ca_certs {config.ssl_ca_certs}"
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"{files}: {error.strerror or error}; accepted: PEM files, the key not encrypted"
        ) from None
    return context


def _tcp(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise UsageError(
            f"cannot listen on {host}, port {port}: {error.strerror}; --host and --port choose "
            "others"
        ) from None
    return listening


def _unix(path: Path) -> socket.socket:
    """In place of a socket that a server has left behind, and of nothing else."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise UsageError(
            f"cannot listen on {path}: {error.strerror or error}; --uds chooses another path"
        ) from None
    return listening


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True
