"""The server's options. The engine's are in `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trueline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network this machine is in."""
    port: int = 8000
    """0 takes a free one, which the start-up tells."""
    uds: Path | None = None
    """Listen on this Unix socket instead of an address and a port."""
    ssl_certfile: Path | None = None
    """A PEM file with the certificate, and those of who signed it: serves HTTPS."""
    ssl_keyfile: Path | None = None
    """Its private key, where the certificate's file has none; not encrypted."""
    ssl_ca_certs: Path | None = None
    """Clients must have a certificate that one of these has signed."""
    served_model_name: tuple[str, ...] = ()
    """Names that requests may give for the model; /v1/models lists them. Default: the
    directory's."""
    tokenizer: str | None = None
    """Directory of another tokenizer than the model's."""
    chat_template: Path | None = None
    """A Jinja file instead of the model's own chat template."""
    trust_request_chat_template: bool = False
    """Whether a request may bring its own. It is rendered in a process of its own, with 2 s of CPU
    time and 256 MiB of memory."""
    reasoning_parser: str | None = None
    """How answers in chats mark their reasoning, by vLLM's names of its parsers; none: it stays in
    the text. Default: as the model's files say."""
    tool_call_parser: str | None = None
    """How they write calls, likewise."""
    api_key: tuple[str, ...] = ()
    """A key that requests need; several are as good. Others can read a command line: better in
    TRUELINE_API_KEY, or in a file."""
    api_key_file: Path | None = None
    """A file with further keys, one per line."""
    max_body_bytes: int = 16 << 20
    """Larger request bodies are refused (413) before they are read."""
    max_sequences: int = 256
    """Prompts × n of one request."""
    max_num_queued: int = 256
    """Sequences that may wait when all seats are taken; more are refused (429)."""
    read_timeout: float = 60.0
    """Seconds that a client has to send a request's head, and then its body (408)."""
    request_timeout: float | None = None
    """Seconds after which a request is given up (504)."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests have left after SIGTERM; a second signal ends at once."""
    on_engine_death: Literal["exit", "restart"] = "exit"
    """What follows when the engine's process dies. More than 5 deaths in 10 minutes end the server
    in any case. Of several replicas each for itself: the server ends when none is left."""
    cors_origin: tuple[str, ...] = ()
    """Origins whose web pages may call this server; "*" for any. None by default."""
    page: bool = True
    """A chat in the browser at /."""
    metrics_prefix: Literal["trueline", "vllm"] = "trueline"
    """Of the names in /metrics: vllm for dashboards made for it."""
    log_format: Literal["text", "json"] = "text"
    """Of the log on stderr: one line per request, never its text."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        for name, least in (("port", 0), ("max_body_bytes", 1), ("max_sequences", 1),
                            ("max_num_queued", 0)):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} = {value!r}: accepted: a whole number from {least} up")
        if self.port > 65535:
            raise UsageError(f"port = {self.port}: accepted: up to 65535")
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{name} without ssl_certfile: accepted: with it")
        for name in ("read_timeout", "request_timeout", "shutdown_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < float("inf"):
                raise UsageError(f"{name} = {seconds!r}: accepted: seconds from 0 up")
