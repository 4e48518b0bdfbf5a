"""A port that is taken: refused, whoever has it and however it shares, and the holder named."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from rayneuron.errors import ConfigError
from rayneuron.serve.port import check_free, haproxy_of_our_own
from tests.serve.scripted import free_port


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_names_who_has_it(shared: bool, host: str) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))  # as Serve's proxies share theirs
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of {host} cannot be had: Address already in use; process {os.getpid()} \("):
            check_free({"host": host, "port": port})


def test_a_free_port_stays_free() -> None:
    port = free_port()
    for _ in range(2):
        check_free({"host": "127.0.0.1", "port": port})


@pytest.mark.parametrize("options", [{"port": "http"}, {"port": 0}, {"host": None}, {"host": "203.0.113.9", "port": 20_000}])
def test_what_is_no_address_here(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        check_free(options)


def test_two_servers_of_a_machine_share_no_file_and_no_port_of_haproxy(tmp_path: Path) -> None:
    """Whatever Ray would put where every server has it: in one place, or at a port where any may listen beside others."""
    from ray.serve._private import constants

    one, two = haproxy_of_our_own(tmp_path / "one"), haproxy_of_our_own(tmp_path / "two")
    assert not set(one.values()) & set(two.values()) and len(set(one.values())) == len(one)
    said = Path(constants.__file__).read_text()
    files = re.findall(r'"(RAY_SERVE_\w+)",\s*"/tmp/haproxy-serve', said)
    ports = re.findall(r'"(RAY_SERVE_(?:HAPROXY|FALLBACK)_\w*PORT)"', said)
    assert set(one) == {*files, *ports}
