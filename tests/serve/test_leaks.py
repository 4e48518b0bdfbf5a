"""`rayneuron doctor --address` without a cluster there; with one it is tests/cluster's."""

from __future__ import annotations

import socket

import pytest

from rayneuron.cli import main


def test_nobody_there_is_said_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray itself would try for minutes"))
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port, and nobody answers there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main(["doctor", "--address", f"127.0.0.1:{port}"]) == 2
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in capsys.readouterr().err
