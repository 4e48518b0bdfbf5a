"""A port that is taken: refused, whoever has it and however it shares, and the holder named."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from rayneuron.errors import ConfigError
from rayneuron.serve.port import check_certificate, check_free, haproxy_of_our_own, reach
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
    with pytest.raises(ConfigError, match="(?i)name.* known|name resolution|not known"):
        check_free({"host": "nowhere.invalid"})


def test_two_servers_of_a_machine_share_no_file_and_no_port_of_haproxy(tmp_path: Path) -> None:
    """Whatever Ray would put where every server has it: in one place, or at a port where any may listen beside others."""
    from ray.serve._private import constants

    one, two = haproxy_of_our_own(tmp_path / "one"), haproxy_of_our_own(tmp_path / "two")
    assert not set(one.values()) & set(two.values()) and len(set(one.values())) == len(one)
    said = Path(constants.__file__).read_text()
    files = re.findall(r'"(RAY_SERVE_\w+)",\s*"/tmp/haproxy-serve', said)
    ports = re.findall(r'"(RAY_SERVE_(?:HAPROXY|FALLBACK)_\w*PORT)"', said)
    assert set(one) == {*files, *ports}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates")
def test_https_is_asked_for_with_a_certificate_and_its_key(tmp_path: Path) -> None:
    key, other, certificate, text = (tmp_path / name for name in ("key.pem", "other.pem", "cert.pem", "text.pem"))
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1", "-out", str(certificate)]
    for where in (other, key):
        subprocess.run([*made, "-keyout", str(where)], check=True, capture_output=True)
    text.write_text("hello")
    good = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    check_certificate({"port": 1})
    check_certificate(good | {"ssl_ca_certs": str(certificate)})
    for wrong, says in (
        ({"ssl_keyfile": None}, "ssl_keyfile is needed too"),
        ({"ssl_certfile": None}, "ssl_certfile is needed too"),
        ({"ssl_keyfile": "/nowhere"}, "ssl_keyfile: /nowhere cannot be read: No such file"),
        ({"ssl_certfile": str(tmp_path)}, "ssl_certfile: .* cannot be read: Is a directory"),
        ({"ssl_keyfile": str(other)}, "are no certificate and its key"),
        ({"ssl_certfile": str(text)}, "are no certificate and its key"),
        ({"ssl_ca_certs": str(text)}, "are no certificate and its key"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_certificate(good | wrong)


def test_an_address_of_ray_is_looked_at_before_ray_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        for there in ("auto", "local", f"127.0.0.1:{number}", f"ray://127.0.0.1:{number}"):
            reach(there)
    for address in ("nonsense", "127.0.0.1:", f"127.0.0.1:{number}", "127.0.0.1:99999999", ":"):
        with pytest.raises(ConnectionError):
            reach(address)
