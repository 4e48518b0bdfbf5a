"""Cores that others have taken without the ledger: found before the runtime refuses them, gone around, waited for, and named."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rayneuron.errors import Busy
from rayneuron.host.keeper import Keeper
from rayneuron.placement import cores, doctor, outside
from rayneuron.placement.cores import Chip, parse_neuron_ls
from rayneuron.placement.instances import instance
from rayneuron.placement.ledger import Ledger
from tests.placement.test_cores import FIXTURES, listed, neuron_ls

INF2 = instance("inf2.48xlarge")
STRANGER = {"pid": 4711, "command": "python serve.py", "neuron_runtime_version": "2.30.51.0"}
WATCHER = {"pid": 99, "command": "neuron-ls -a", "neuron_runtime_version": "NA"}


def shown(used: Sequence[int], by: Sequence[dict[str, object]] = (STRANGER, WATCHER)) -> str:
    """What neuron-ls prints of an inf2.48xlarge whose devices `used` have users."""
    entries = json.loads(listed(INF2, range(12)))
    return json.dumps([entry | {"neuron_processes": list(by) if entry["neuron_device"] in used else []} for entry in entries])


def chips(used: Sequence[int]) -> tuple[Chip, ...]:
    return parse_neuron_ls(shown(used))


def test_who_only_looks_uses_nothing() -> None:
    assert [chip.users for chip in chips([1])][:3] == [(), ((4711, "python serve.py"),), ()]
    assert parse_neuron_ls(shown([1], [WATCHER]))[1].users == ()
    assert parse_neuron_ls((FIXTURES / "inf2.xlarge.json").read_text())[0].users == ((4711, "python serve.py"),)


def test_cores_somebody_else_uses_are_gone_around(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "node", INF2)
    with outside.take(ledger, 8, "chat", range(24), 0.0, lambda: chips([0, 1])) as grant:
        assert grant.cores == tuple(range(8, 16))
        again = chips([0, 1, 4, 5, 6, 7])  # ours use devices too, and are in the ledger
        assert outside.said(outside.taken(again, ledger.free())) == "0-3 used by pid 4711 (python serve.py), which is not in the ledger"
        with outside.take(ledger, 8, "code", range(24), 0.0, lambda: again) as other:
            assert other.cores == tuple(range(16, 24))
            with pytest.raises(Busy, match=r"wants 8 of the 24 cores.*free: 4-7.*0-3 used by pid 4711 \(python serve.py\), which"):
                outside.take(ledger, 8, "sum", range(24), 0.0, lambda: again)


def test_half_a_device_of_ours_is_no_stranger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "node", INF2)
    with ledger.take(1, "small", allowed=[0]):
        with outside.take(ledger, 1, "other", [0, 1], 0.0, lambda: chips([0])) as grant:
            assert grant.cores == (1,)


def test_nothing_else_fits_so_it_is_waited_for_and_named(tmp_path: Path) -> None:
    ledger, used = Ledger(tmp_path / "node", INF2), [3]
    with pytest.raises(Busy, match=r"chat wants 24 cores of 0-23, and 6-7 used by pid 4711 .*: end it, or start Ray with NEURON") as no:
        outside.take(ledger, 24, "chat", range(24), 0.0, lambda: chips(used))
    assert no.value.retry and ledger.free() == set(range(24)), "nothing is held meanwhile"
    threading.Timer(0.5, used.clear).start()
    with outside.take(ledger, 24, "chat", range(24), 20.0, lambda: chips(used)) as grant:
        assert len(grant.cores) == 24


def test_the_doctor_and_the_keeper_of_a_node_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neuron_ls(tmp_path, shown([0, 2]))
    monkeypatch.setenv("RAYNEURON_LEDGER", str(tmp_path / "cores"))
    monkeypatch.setattr(outside.look, "__defaults__", (tmp_path,))
    monkeypatch.setenv("RAYNEURON_RUNTIME", "")
    with Ledger(tmp_path / "cores" / "10.0.0.7", INF2).take(2, "chat", allowed=range(8, 10)):
        lines = list(doctor.report(tmp_path / "cores", root=tmp_path))
        assert lines[-1] == (
            "cores 0-1, 4-5 used by pid 4711 (python serve.py), which is not in the ledger: end it, or start Ray with "
            "NEURON_RT_VISIBLE_CORES of the others"
        )
        keeper = Keeper("10.0.0.7", "inf2.48xlarge")
        assert keeper.look()["free"] == [2, 3, 6, 7, *range(10, 24)] and keeper.look()["left"] == list(range(24))
    (tmp_path / cores.NEURON_LS).write_text("#!/bin/sh\nexit 1\n")
    assert outside.look() == (), "and where neuron-ls fails all of a sudden, the ledger alone counts"
