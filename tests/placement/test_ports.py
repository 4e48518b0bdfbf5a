"""Ports for the runtime's own meetings: which, in what order, and where the kernel may give them away."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from rayneuron.errors import ConfigError
from rayneuron.group.messages import Place
from rayneuron.group.rank import Rank
from rayneuron.placement import ports


def test_groups_of_a_node_begin_apart() -> None:
    pool = ports.pool(None)
    assert (pool[0], pool[-1]) == (62182, 62693) and len(list(ports.pairs(pool, 0))) == 256
    assert [next(ports.pairs(pool, core)) for core in (0, 1, 128, 256)] == [(62182, 62183), (62184, 62185), (62438, 62439), (62182, 62183)]
    assert list(ports.pairs(ports.pool("70-74"), 1)) == [(72, 73), (70, 71)]


@pytest.mark.parametrize("said", ["62182", "5-4", "0-9", "65000-70000", "a-b", "7-7", "1-2,5-9"])
def test_what_is_no_range(said: str) -> None:
    with pytest.raises(ConfigError, match="is no range of two or more ports; write RAYNEURON_ROOT_PORTS=62182-62693"):
        ports.pool(said)


@pytest.mark.parametrize(
    ("local", "reserved", "said", "risk"),
    [
        ("32768\t60999", "", None, None),  # Linux's own
        ("1024 65535", "", None, r"net.ipv4.ip_local_reserved_ports=62182-62693`"),
        ("1024 65535", "8080,62000-63000", None, None),
        ("1024 65535", "62182-62500", None, r"ip_local_reserved_ports=62182-62500,62182-62693`"),
        ("32768 60999", "", "50000-50010", "ports 50000-50010 .* in the kernel's own range 32768-60999"),
    ],
)
def test_ports_the_kernel_gives_away(tmp_path: Path, local: str, reserved: str, said: str | None, risk: str | None) -> None:
    folder = tmp_path / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_local_port_range").write_text(local + "\n")
    (folder / "ip_local_reserved_ports").write_text(reserved + "\n")
    found = ports.endangered(ports.pool(said), tmp_path)
    assert found is None if risk is None else re.search(risk, found or "")
    assert ports.endangered(ports.pool(None), tmp_path / "none") is None


def test_a_rank_holds_its_ports_until_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of one machine, the second of which finds the first's ports taken; a third finds none."""
    taken = ports.hold("127.0.0.1", (0,))
    assert taken is not None
    first = taken[0].getsockname()[1]
    monkeypatch.setenv("RAYNEURON_ROOT_PORTS", f"{first}-{first + 3}")
    rank, other = Rank(), Rank()
    place = Place(deployment="d", index=0, node_ip="127.0.0.1", token=b"")
    assert rank.place(place).ports == (first + 2, first + 3), "the first pair is not free"
    with pytest.raises(OSError):
        socket.create_server(("127.0.0.1", first + 2))
    with pytest.raises(ConnectionRefusedError):  # taken and dropped later would be a lost rank: only a refused one comes again
        socket.create_connection(("127.0.0.1", first + 2))
    with pytest.raises(ConfigError, match=f"all ports {first}-{first + 3} of 127.0.0.1 are taken; write RAYNEURON_ROOT_PORTS=FIRST-LAST"):
        other.place(place)

    class Warmed:
        def warm(self, progress: object) -> None:
            socket.create_server(("127.0.0.1", first + 2)).close()

        def close(self) -> None:
            return None

    rank.runner = Warmed()  # type: ignore[assignment]
    rank.warm(lambda done, total: None)
    rank.close()
    taken[0].close()


def test_a_node_that_cannot_be_reached_is_said_before_anything_is_compiled() -> None:
    """A held port refuses, which is an answer; where packets are dropped (here: the queue of a listener is full) there is none."""
    held = ports.hold("127.0.0.1", (0,))
    assert held is not None
    ports.reach(f"127.0.0.1:{held[0].getsockname()[1]}", 1.0)
    held[0].close()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        meeting = f"127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"cannot reach {meeting}, .*\(timed out\); let the nodes of a deployment send each other"):
            ports.reach(meeting, 0.2)
