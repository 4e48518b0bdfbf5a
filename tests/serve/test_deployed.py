"""What the class that Serve deploys sets up in its process."""

from __future__ import annotations

import logging

import pytest

from rayneuron.serve.deployed import log_through_serve


def test_what_is_asked_twice_a_second_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    serves, seen = logging.getLogger("ray.serve"), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    monkeypatch.setattr(serves, "handlers", [Keep()])
    monkeypatch.setattr(serves, "filters", [])
    monkeypatch.setattr(serves, "level", logging.INFO)
    ours = logging.getLogger("rayneuron")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    log_through_serve()
    told = ["CALL card ERROR 1ms", "CALL chat OK 80ms", "POST /v1/completions 200 9ms"]
    for line in ("CALL card OK 0.5ms", "CALL replica_metrics OK 3ms", *told):
        serves.info(line)
    logging.getLogger("rayneuron.serve").info("of our own")
    assert seen == [*told, "of our own"]
