"""What a first start begins while Ray starts: what is not there is made by somebody else than who waits for it; else nothing is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rayneuron import demo, devices
from rayneuron.config import parse
from rayneuron.devices.cpu import library
from rayneuron.serve import fresh
from tests.serve.scripted import PATIENCE_S, eventually


def test_what_is_not_there_is_made_while_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path))
    built: list[str] = []
    before = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(library, "built", built.append)
    config = parse({"model": {"path": "demo:random:tiny"}})
    fresh.begin([config])
    eventually(lambda: demo.located("demo:random:tiny") is not None and built == [library.best()], PATIENCE_S)
    begun: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: begun.append(words))
    fresh.begin([config])
    eventually(lambda: len(built) == 2, PATIENCE_S)
    assert begun == [], "it is there"
    assert os.getpriority(os.PRIO_PROCESS, 0) == before, "only who makes it goes behind"


def test_kernels_are_built_where_none_ever_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(library, "built", built.append)
    devices.build_first("cpu")
    assert built == [], "the tests have built them"
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path))
    devices.build_first("neuron")
    assert built == []
    devices.build_first("cpu")
    assert built == [library.best()]


def test_without_a_compiler_a_start_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    devices.build_first("cpu")
    assert not list(tmp_path.rglob("*.so"))
