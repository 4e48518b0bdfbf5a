"""Addresses for the nodes of a test cluster: network namespaces on one bridge where this user may make them, else loopback addresses.

In a namespace a node has interfaces, ports and unix sockets of its own, as a host has, and its cable can be pulled.
"""

from __future__ import annotations

import secrets
import subprocess
from dataclasses import dataclass, field


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass
class Network:
    """`head` is this process's own side; `nodes` the others'. `real` where they are hosts of their own."""

    head: str = "127.0.0.1"
    nodes: tuple[str, ...] = ("127.0.0.2", "127.0.0.3")
    real: bool = False
    _name: str = field(default_factory=lambda: f"rn{secrets.token_hex(3)}")

    def open(self) -> Network:
        """Make the namespaces, or leave it at loopback."""
        third = secrets.randbelow(250)
        head, nodes = f"10.199.{third}.1", tuple(f"10.199.{third}.{last}" for last in (2, 3))
        made = (
            _run("ip", "link", "add", self._name, "type", "bridge")
            and _run("ip", "addr", "add", f"{head}/24", "dev", self._name)
            and _run("ip", "link", "set", self._name, "up")
            and all(self._add(i, node) for i, node in enumerate(nodes))
        )
        if made:
            self.head, self.nodes, self.real = head, nodes, True
        else:
            self.close()
        return self

    def inside(self, node: str) -> list[str]:
        """What to put before a command so that it runs on that node."""
        return ["ip", "netns", "exec", self._space(node)] if self.real and node in self.nodes else []

    def cut(self, node: str) -> None:
        """Pull the cable: nothing gets through any more, and nobody is told."""
        assert _run("ip", "link", "set", self._port(node), "down")

    def heal(self, node: str) -> None:
        """Put it back in."""
        assert _run("ip", "link", "set", self._port(node), "up")

    def close(self) -> None:
        """Take everything away. What runs inside must have ended."""
        for i in range(2):
            _run("ip", "netns", "del", f"{self._name}n{i}")
        _run("ip", "link", "del", self._name)

    def _add(self, i: int, node: str) -> bool:
        space, port = f"{self._name}n{i}", f"{self._name}p{i}"
        inside = ("ip", "netns", "exec", space)
        return (
            _run("ip", "netns", "add", space)
            and _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            and _run("ip", "link", "set", port, "master", self._name, "up")
            and _run(*inside, "ip", "addr", "add", f"{node}/24", "dev", "eth0")
            and _run(*inside, "ip", "link", "set", "eth0", "up")
            and _run(*inside, "ip", "link", "set", "lo", "up")
        )

    def _space(self, node: str) -> str:
        return f"{self._name}n{self.nodes.index(node)}"

    def _port(self, node: str) -> str:
        return f"{self._name}p{self.nodes.index(node)}"
