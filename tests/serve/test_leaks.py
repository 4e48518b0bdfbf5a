"""`rayneuron doctor --address` without a cluster there; with one it is tests/cluster's."""

from __future__ import annotations

import socket
import time

import pytest

from rayneuron.cli import main


def test_nobody_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    assert main(["doctor", "--address", f"127.0.0.1:{port}"]) == 2
    assert time.monotonic() - began < 10, "Ray alone would try for minutes"
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in capsys.readouterr().err
