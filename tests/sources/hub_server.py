"""A model hub on loopback: model info, trees, files with ETags, LFS behind a redirect, ranges, and faults that are asked for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LFS = (".safetensors", ".bin")


@dataclass
class Hub:
    """Models as {name: {commit: {file: bytes}}}. A fault is {file: [what GETs of it do, one after the other]}."""

    url: str = ""
    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    token: str | None = None  # who does not send it is refused
    gated: bool = False
    ill: bool = False  # every answer is a 500
    sizes: dict[str, int] = field(default_factory=dict)  # told instead of the real ones
    faults: dict[str, list[Any]] = field(default_factory=dict)  # an int: the bytes after which it breaks off; "damaged"
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # (method, path, range)

    def add(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """A commit, which the branch then is at."""
        commit = hashlib.sha1(repr((name, sorted((n, hashlib.sha256(b).hexdigest()) for n, b in files.items()))).encode()).hexdigest()
        self.models.setdefault(name, {})[commit] = files
        self.branches.setdefault(name, {})[branch] = commit
        return commit

    def fetched(self) -> list[str]:
        """The files whose bytes were asked for, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/api/" not in path]


def folder(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(hub, self)

        def do_HEAD(self) -> None:
            _answer(hub, self)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(hub: Hub, to: BaseHTTPRequestHandler) -> None:
    path = to.path.partition("?")[0]
    hub.asked.append((to.command, path, to.headers.get("Range", "")))
    if hub.ill:
        return _say(to, 500, {})
    cdn = re.fullmatch(r"/cdn/(\w+)/(.+)", path)
    if cdn:
        data = next(b for m in hub.models.values() for files in m.values() for b in files.values() if _sha256(b) == cdn[1])
        return _bytes(hub, to, cdn[2], data, {"ETag": f'"{cdn[1]}"'})
    api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
    file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
    found = api or file
    name = found[1] if found else ""
    if hub.token is not None and to.headers.get("Authorization") != f"Bearer {hub.token}" and not (api and hub.gated):
        return _say(to, 403 if hub.gated else 401, {"X-Error-Code": "GatedRepo" if hub.gated else "RepoNotFound"})
    if not found or name not in hub.models:
        return _say(to, 404, {"X-Error-Code": "RepoNotFound"})
    said = found[3] if api else found[2]
    commit = hub.branches[name].get(said.replace("%2F", "/"), said)
    if commit not in hub.models[name]:
        return _say(to, 404, {"X-Error-Code": "RevisionNotFound"})
    files = hub.models[name][commit]
    if api:
        return _json(to, _info(hub, name, commit, files) if api[2] == "revision" else [_entry(hub, n, b) for n, b in files.items()])
    data = files[file[3]]  # type: ignore[index]
    told = {"X-Repo-Commit": commit, "ETag": f'"{_git(data)}"'}
    if file[3].endswith(LFS):  # type: ignore[index]
        length = str(hub.sizes.get(file[3], len(data)))  # type: ignore[index]
        where = f"{hub.url.replace('127.0.0.1', 'localhost')}/cdn/{_sha256(data)}/{file[3]}"  # type: ignore[index]
        return _say(to, 302, {**told, "X-Linked-Etag": f'"{_sha256(data)}"', "X-Linked-Size": length, "Location": where})
    _bytes(hub, to, file[3], data, told)  # type: ignore[index]


def _bytes(hub: Hub, to: BaseHTTPRequestHandler, name: str, data: bytes, headers: dict[str, str]) -> None:
    start = int((re.match(r"bytes=(\d+)-", to.headers.get("Range", "")) or ["", "0"])[1])
    rest, fault = data[start:], None
    if to.command == "GET" and hub.faults.get(name):
        fault = hub.faults[name].pop(0)
    if fault == "damaged":
        rest = bytes([rest[0] ^ 1]) + rest[1:]
    to.send_response(206 if start else 200)
    for key, value in {**headers, "Content-Length": str(len(rest)), "Accept-Ranges": "bytes"}.items():
        to.send_header(key, value)
    to.end_headers()
    if to.command == "GET":
        to.wfile.write(rest[:fault] if isinstance(fault, int) else rest)
    if isinstance(fault, int):
        to.wfile.flush()
        to.close_connection = True
        to.connection.shutdown(2)


def _say(to: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
    to.send_response(status)
    for key, value in {**headers, "Content-Length": "0"}.items():
        to.send_header(key, value)
    to.end_headers()


def _json(to: BaseHTTPRequestHandler, said: Any) -> None:
    text = json.dumps(said).encode()
    to.send_response(200)
    to.send_header("Content-Type", "application/json")
    to.send_header("Content-Length", str(len(text)))
    to.end_headers()
    to.wfile.write(text)


def _info(hub: Hub, name: str, commit: str, files: dict[str, bytes]) -> dict[str, Any]:
    siblings = []
    for entry in (_entry(hub, n, b) for n, b in files.items()):
        lfs = {"lfs": {**entry["lfs"], "sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {}
        siblings.append({"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"], **lfs})
    return {"_id": "1", "id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings, "tags": [], "downloads": 0}


def _entry(hub: Hub, name: str, data: bytes) -> dict[str, Any]:
    size = hub.sizes.get(name, len(data))
    lfs = {"lfs": {"oid": _sha256(data), "size": size, "pointerSize": 134}} if name.endswith(LFS) else {}
    return {"type": "file", "path": name, "size": size, "oid": _git(data), **lfs}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
