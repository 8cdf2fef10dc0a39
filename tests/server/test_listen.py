"""Where a server listens: Unix sockets, TLS, and what cannot be listened on."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from servers import serving
from trueline.errors import UsageError
from trueline.server.config import ServerConfig
from trueline.server.listen import close, listen, tls_context, url

Tiny = Callable[..., Path]
PEM = Path(__file__).parent / "localhost.pem"
"""A certificate for localhost with its key, signed by itself."""


def test_https_over_a_unix_socket(tiny: Tiny, tmp_path: Path) -> None:
    """Both in one server: what either changes is below HTTP."""
    path = tmp_path / "socket"
    flags = ("--uds", str(path), "--ssl-certfile", str(PEM), "--ssl-ca-certs", str(PEM))
    with serving(tiny("deepseek_v3"), *flags) as served:
        assert served.url == f"unix:{path}"
        trusting = ssl.create_default_context(cafile=PEM)
        for certificate in (False, True):
            if certificate:
                trusting.load_cert_chain(PEM)
            transport = httpx2.HTTPTransport(uds=str(path), verify=trusting)
            with httpx2.Client(transport=transport, timeout=60) as client:
                if certificate:
                    assert client.get("https://localhost/health/ready").status_code == 200
                else:
                    with pytest.raises(httpx2.HTTPError):
                        client.get("https://localhost/health/ready")
        transport = httpx2.HTTPTransport(uds=str(path))
        with (
            httpx2.Client(transport=transport, timeout=60) as client,
            pytest.raises(httpx2.HTTPError),
        ):
            client.get("http://localhost/health/ready")
        served.process.terminate()
        assert served.ended() == 0
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    config = ServerConfig(uds=path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    listening = listen(config)
    try:
        assert url(listening, tls=False) == f"unix:{path}"
        with pytest.raises(UsageError, match=f"{path}.*--uds"):
            listen(config)
        assert path.exists()  # the other server's
    finally:
        close(listening, config)
    assert not path.exists()


def test_nothing_but_a_socket_is_replaced(tmp_path: Path) -> None:
    for path in (tmp_path / "file", tmp_path / "no" / "such", tmp_path / ("x" * 200)):
        if path.name == "file":
            path.write_text("mine")
        with pytest.raises(UsageError, match="--uds"):
            listen(ServerConfig(uds=path))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_urls(host: str, shown: str) -> None:
    config = ServerConfig(host=host, port=0)
    listening = listen(config)
    try:
        port = listening.getsockname()[1]
        assert url(listening, tls=True) == f"https://{shown}:{port}"
        assert url(listening, tls=False) == f"http://{shown}:{port}"
    finally:
        close(listening, config)


def test_what_tls_cannot_read(tmp_path: Path) -> None:
    assert tls_context(ServerConfig()) is None
    text = PEM.read_text()
    begin = text.index("-----BEGIN PRIVATE")
    only, key, bad = tmp_path / "only.pem", tmp_path / "key.pem", tmp_path / "bad.pem"
    only.write_text(text[:begin])
    key.write_text(text[begin:])
    bad.write_text("no PEM")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkcs8", "-topk8", "-in", key, "-passout", "pass:x", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    assert tls_context(ServerConfig(ssl_certfile=only, ssl_keyfile=key)) is not None
    for certificate, private, name in (
        (tmp_path / "none.pem", None, "none.pem"),
        (only, None, "only.pem"),
        (only, bad, "bad.pem"),
        (only, locked, "locked.pem"),
    ):
        with pytest.raises(UsageError, match=name):
            tls_context(ServerConfig(ssl_certfile=certificate, ssl_keyfile=private))
    with pytest.raises(UsageError, match=r"ssl_ca_certs .*bad\.pem"):
        tls_context(ServerConfig(ssl_certfile=PEM, ssl_ca_certs=bad))
    for name in ("ssl_keyfile", "ssl_ca_certs"):
        with pytest.raises(UsageError, match=f"{name} without ssl_certfile"):
            ServerConfig(**{name: PEM})
