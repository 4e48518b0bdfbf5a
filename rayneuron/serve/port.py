"""Whether a TCP port is free for us alone, who has it if not, and what listens on it; what a server must not share with another."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayneuron.errors import ConfigError

ANSWER_S = 5.0
LISTENS = "0A"  # the state, in /proc/net/tcp
HAPROXY_FILES = {  # by variable; what HAProxy reads, where it is told what to do, and what it was like before it was started anew
    "CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock", "METRICS_SOCKET_PATH": "metrics.sock", "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
}  # fmt: skip
HAPROXY_PORTS = ("HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")


def check_free(http_options: Mapping[str, Any]) -> None:
    """Raise ConfigError where we could not listen there alone: Serve's proxies share a port with any other that is willing to."""
    host, port = http_options.get("host", "0.0.0.0"), http_options.get("port", 8000)
    if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError(f"http_options need a host and a port from 1 to 65535, got {host!r} and {port!r}", param="http_options")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as wrong:
        known = (wrong.errno or 0) > 0  # not of a name that nobody knows
        why, holders = os.strerror(wrong.errno) if known and wrong.errno else wrong.strerror or str(wrong), ", ".join(holders_of(port))
        advice = "end that, write another port, or update what runs there by `serve deploy`"
        why += f"; {holders} has it: {advice}" if holders else ""
        raise ConfigError(f"port {port} of {host} cannot be had: {why}", param="http_options.port") from None


def check_certificate(http_options: Mapping[str, Any]) -> None:
    """Raise ConfigError where HTTPS is asked for with files that make none: Serve would not listen, and say nothing of it."""
    named = {name: http_options.get(f"ssl_{name}") for name in ("certfile", "keyfile", "ca_certs")}
    if not any(named.values()):
        return
    for name, path in named.items():
        try:
            if path is None and name != "ca_certs":
                raise ConfigError(f"http_options.ssl_{name} is needed too, for HTTPS", param="http_options")
            if path is not None:
                Path(path).open("rb").close()
        except OSError as wrong:
            raise ConfigError(f"http_options.ssl_{name}: {path} cannot be read: {wrong.strerror}", param="http_options") from None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=named["ca_certs"])
        context.load_cert_chain(str(named["certfile"]), named["keyfile"], http_options.get("ssl_keyfile_password") or "")
    except (ssl.SSLError, ValueError) as wrong:
        said = f"{named['certfile']} and {named['keyfile']} are no certificate and its key: {wrong}"
        raise ConfigError(f"http_options.ssl_certfile, ssl_keyfile: {said}", param="http_options") from None


def reach(address: str) -> None:
    """Raise ConnectionError at once where no Ray can answer: Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        raise ConnectionError("an address is HOST:PORT, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as wrong:
        raise ConnectionError(str(wrong)) from None


def haproxy_of_our_own(folder: Path) -> dict[str, str]:
    """Variables for a server that is to have an HAProxy of its own, whose files are in `folder`: one with a short name, since Ray puts a
    node's id behind it, and paths of sockets have 97 letters. By default all servers share its files, and the port of the proxy it sends
    calls to that no replica takes: any process may listen there beside others, and one server's callers would be told how it stands with
    another."""
    folder.mkdir(mode=0o700, exist_ok=True)
    files = {f"RAY_SERVE_HAPROXY_{key}": str(folder / name) for key, name in HAPROXY_FILES.items()}
    with contextlib.ExitStack() as held:  # all at once, so that no two are the same
        taken = [held.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in HAPROXY_PORTS]
    return files | {f"RAY_SERVE_{name}_PORT": str(number) for name, number in zip(HAPROXY_PORTS, taken, strict=True)}


def holders_of(port: int) -> list[str]:
    """The processes that listen on a port, as far as this user may see them: "process 12 (nginx: master)"."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(descriptor.readlink()) in inodes for descriptor in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(f"process {process.name} ({words[:80]})")
        except OSError:
            continue  # it has ended, or is not ours to see
    return found


def _listening(table: Path, port: int) -> list[str]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port]
