"""A hub on this machine, in the protocol that huggingface_hub speaks: models with revisions, files
with ETags, large ones on another address as the hub's CDN has them, tokens, ranges, bad lines."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

PIECE = 50_000
LARGE = ".safetensors"
"""Such files are in large file storage: they are somewhere else than the hub says at first."""


@dataclass
class StubRepo:
    commits: dict[str, dict[str, bytes]]
    """Files by commit."""
    refs: dict[str, str]
    private: bool = False
    gated: bool = False


@dataclass
class Hub:
    url: str
    token: str = "hf_right"
    repos: dict[str, StubRepo] = field(default_factory=dict)
    cut: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    """By file: after how many bytes the next connections end, and whether by a reset."""
    pace: dict[str, float] = field(default_factory=dict)
    """By file: seconds between its pieces."""
    sent: Counter[str] = field(default_factory=Counter)
    """By file: bytes that somebody took."""
    requests: list[str] = field(default_factory=list)
    """METHOD path, with the range."""

    def add(self, name: str, directory: Path, **more: bool) -> StubRepo:
        files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
        content = {str(file.relative_to(directory)): file.read_bytes() for file in files}
        self.repos[name] = StubRepo({}, {}, **more)
        self.push(name, content)
        return self.repos[name]

    def push(self, name: str, files: dict[str, bytes], ref: str = "main") -> str:
        digest = hashlib.sha1(ref.encode())
        for path, data in sorted(files.items()):
            digest.update(path.encode() + data)
        commit = digest.hexdigest()
        self.repos[name].commits[commit] = files
        self.repos[name].refs[ref] = commit
        return commit

    def bodies(self) -> list[str]:
        """What was fetched: names of files, and of ranges."""
        found = [re.fullmatch(r"GET .*/(?:resolve|lfs)/\w+/(.*)", line) for line in self.requests]
        return [match[1] for match in found if match]


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def asked_hub(cache: Path) -> Iterator[Hub]:
    """A hub that this process asks, whose huggingface_hub has read its environment already."""
    from huggingface_hub import constants

    with running_hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", PIECE)  # what is kept of a lost connection
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
        patch.setenv("HF_HUB_CACHE", str(cache))
        patch.delenv("HF_TOKEN", raising=False)
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *rest: object) -> None:
        self.hub = hub
        super().__init__(*rest)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        ranged = f" {self.headers['Range']}" if self.headers["Range"] else ""
        self.hub.requests.append(f"{self.command} {path}{ranged}")
        part = r"[^/]+/[^/]+"
        if match := re.fullmatch(rf"/api/models/({part})(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(rf"/api/models/({part})/tree/(\w+)", path):
            self._tree(match[1], match[2])
        elif match := re.fullmatch(rf"/({part})/resolve/(\w+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/lfs/(\w+)/(.+)", path):
            self._lfs(match[1], match[2])
        else:
            self._refuse(404, "NotFound")

    def _repo(self, name: str, content: bool = False) -> StubRepo | None:
        """None: refused. What a repository is may be seen where its files may not."""
        repo, given = self.hub.repos.get(name), self.headers["Authorization"]
        known = given == f"Bearer {self.hub.token}"
        if given and not known:
            self._refuse(401, None, "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and not known):
            self._refuse(404 if known else 401, "RepoNotFound")
        elif content and repo.gated:
            self._refuse(403 if known else 401, "GatedRepo")
        else:
            return repo
        return None

    def _info(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        commit = revision if revision in repo.commits else repo.refs.get(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
        else:
            self._json({"id": name, "modelId": name, "sha": commit, "siblings": []})

    def _tree(self, name: str, commit: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        found = []
        for path, data in repo.commits[commit].items():
            entry: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
            entry["oid"] = hashlib.sha1(data).hexdigest()
            if path.endswith(LARGE):
                oid = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
            found.append(entry)
        self._json(found)

    def _resolve(self, name: str, commit: str, path: str) -> None:
        repo = self._repo(name, content=True)
        if repo is None:
            return
        data = repo.commits[commit].get(path)
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if path.endswith(LARGE):
            oid = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data))}
            elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
            headers["Location"] = f"{elsewhere}/lfs/{oid}/{path}"
            self._send(302, b"", headers)
        else:
            self._file(path, data, headers)

    def _lfs(self, oid: str, path: str) -> None:
        if self.headers["Authorization"]:
            self._refuse(400, None, "a token for somebody else")
            return
        for repo in self.hub.repos.values():
            for files in repo.commits.values():
                data = files.get(path)
                if data is not None and hashlib.sha256(data).hexdigest() == oid:
                    self._file(path, data, {"ETag": f'"{oid}"'})
                    return
        self._refuse(404, "NotFound")

    def _file(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        begin, status = 0, 200
        if ranged := self.headers["Range"]:
            begin, status = int(ranged.removeprefix("bytes=").removesuffix("-")), 206
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cuts = self.hub.cut.get(path, []) if self.command == "GET" else []
        if path not in self.hub.pace or self.command == "HEAD":
            self._send(status, data[begin:], headers, cuts.pop(0) if cuts else None)
            return
        self._head(status, len(data) - begin, headers)
        for at in range(begin, len(data), PIECE):
            self.wfile.write(data[at : at + PIECE])
            self.hub.sent[path] += PIECE
            time.sleep(self.hub.pace[path])

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str | None, message: str = "no") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, b"", headers)

    def _head(self, status: int, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(size)}).items():
            self.send_header(key, value)
        self.end_headers()

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], cut: tuple[int, bool] | None = None
    ) -> None:
        self._head(status, len(body), headers)
        if self.command == "HEAD":
            return
        if cut is None:
            self.wfile.write(body)
            return
        most, reset = cut
        self.wfile.write(body[:most])
        self.close_connection = True
        if reset:  # what the network does when a router forgets
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
