"""Ports the Neuron runtime binds by itself, long after they were chosen: outside the range from which the kernel gives one to anybody."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from rayneuron.errors import ConfigError

NAME, DEFAULT = "RAYNEURON_ROOT_PORTS", "62182-62693"  # two for each of 256 cores
_RANGE = "proc/sys/net/ipv4/ip_local_port_range"
_RESERVED = "proc/sys/net/ipv4/ip_local_reserved_ports"


def pool(said: str | None) -> range:
    """The ports of this node for meetings of the runtime, as RAYNEURON_ROOT_PORTS says. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", said or DEFAULT, re.ASCII)
    ports = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if len(ports) < 2 or not 0 < ports[0] <= ports[-1] < 65536:
        raise ConfigError(f"{NAME}={said!r} is no range of two or more ports; write {NAME}={DEFAULT}", param=NAME)
    return ports


def pairs(ports: range, core: int) -> Iterator[tuple[int, int]]:
    """Pairs of neighbours in the order in which to try them. The core is the caller's alone, so groups of one node begin apart."""
    count = len(ports) // 2
    for i in range(count):
        first = 2 * ((core + i) % count)
        yield ports[first], ports[first + 1]


def hold(ip: str, ports: Sequence[int]) -> list[socket.socket] | None:
    """Sockets bound to these very ports of one address, or None where somebody has one of them. They do not listen: who comes early is
    refused and tries again, where a listener would take the call and drop it in the end. (SO_REUSEADDR would let two of them bind.)"""
    held: list[socket.socket] = []
    try:
        for port in ports:
            held.append(socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET))
            held[-1].bind((ip, port))
    except OSError:
        for one in held:
            one.close()
        return None
    return held


def reach(meeting: str, within_s: float) -> None:
    """Raise ConfigError where a packet does not get to the host of a meeting: its runtime would wait for ever. A port that nobody listens
    on yet refuses, and that is an answer."""
    ip, _, port = meeting.rpartition(":")
    try:
        socket.create_connection((ip.strip("[]"), int(port)), within_s).close()
    except ConnectionRefusedError:
        return
    except OSError as problem:
        raise ConfigError(
            f"this node cannot reach {meeting}, where the ranks of its stage meet ({problem or 'nothing answers'}); let the nodes of a "
            "deployment send each other everything: a security group that allows all traffic from itself, on every port"
        ) from None


def endangered(ports: range, root: Path = Path("/")) -> str | None:
    """What to do where the kernel may give one of `ports` to any program that connects; None where it may not."""
    try:
        low, high = map(int, (root / _RANGE).read_text().split())
        said = (root / _RESERVED).read_text().strip()
    except (OSError, ValueError):
        return None
    reserved = {port for part in said.split(",") if part for port in _span(part)}
    if not any(low <= port <= high and port not in reserved for port in ports):
        return None
    mine = f"{ports[0]}-{ports[-1]}"
    return (
        f"ports {mine} of the Neuron runtime lie in the kernel's own range {low}-{high}: any program may have one before the runtime binds "
        f"it, and then all ranks wait for ever; write `sysctl -w net.ipv4.ip_local_reserved_ports={','.join(filter(None, (said, mine)))}`, "
        f"or {NAME}=FIRST-LAST outside that range"
    )


def _span(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
