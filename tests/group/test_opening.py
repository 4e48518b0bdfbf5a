"""Opening a rank: whichever part of it fails, what was taken before is given back: threads, locks on cores, shared memory, ports."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rayneuron import loading, wire
from rayneuron.collectives import shared_memory
from rayneuron.config import parse
from rayneuron.devices.cpu import device
from rayneuron.errors import Busy, CheckpointError, ConfigError, WorkerLost
from rayneuron.group import links
from rayneuron.group.messages import Begin, Place
from rayneuron.group.opening import open_rank
from rayneuron.group.rank import Rank
from rayneuron.placement import ports
from rayneuron.placement.instances import instance
from rayneuron.placement.ledger import Ledger

CORES, TOKEN = "cores:8", b"t" * 32
ARGS: dict[str, Any] = {"dtype": "fp32", "threads": 2, "max_model_len": 64, "max_num_seqs": 2}
STAGE = {"tensor_parallel": 2, "pipeline_parallel": 2}


class Failing(Exception):
    """What a part ends with."""


def fail(*_: object, **__: object) -> None:
    raise Failing


def settled() -> tuple[list[str], int]:
    """`held` once the kernel has taken away the threads that have ended."""
    seen = [held()]
    while len(seen) < 4 or any(one != seen[-1] for one in seen[-4:]):
        time.sleep(0.005)
        seen.append(held())
    return seen[-1]


def held() -> tuple[list[str], int]:
    """Open files of this process (sockets, shared memory, locks), and how many threads it has, those of C++ too."""
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
    return sorted(files), len(os.listdir("/proc/self/task"))


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


# One rank alone


@pytest.mark.parametrize("part", ["kernels", "weights", "device load", "nothing"])
@pytest.mark.parametrize("queued", [False, True])
def test_one_rank(part: str, queued: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, _ = loading.check(parse({"model": {"path": str(model)}, **ARGS, "compile": {"async_mode": queued}}))
    open_rank(opened, 2, lambda done, total: None).close()  # what torch and the loader keep for good is there now
    before, met = settled(), []
    if part == "kernels":
        monkeypatch.setattr(device, "kernels", fail)
    elif part == "weights":
        whole = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(whole[:-8])
    elif part == "device load":
        load = device.Cpu.load

        def loaded_then_fail(self: device.Cpu, *args: Any) -> None:
            load(self, *args)
            met.append(held()[1])
            raise Failing

        monkeypatch.setattr(device.Cpu, "load", loaded_then_fail)
    if part == "nothing":
        runner = open_rank(opened, 2, lambda done, total: None)
        assert held() != before, "it has threads of its own"
        runner.close()
    else:
        with pytest.raises((Failing, CheckpointError)):
            open_rank(opened, 2, lambda done, total: None)
    assert settled() == before
    assert all(count > before[1] for count in met)


# A rank in the middle of a group: two ranks share each stage's memory, a stage before and one after


class Neighbours:
    """What the other ranks would be: the stage after listens, the stage before calls."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self.after = self._held.enter_context(wire.listen())

    def call(self, link: str) -> None:
        self._held.enter_context(links.dial(link, TOKEN, 0, "the rank", 10.0))

    def close(self) -> None:
        self._held.close()


def opened(rank: Rank, path: Path, ledger: Path, neighbours: Neighbours, **begin: Any) -> None:
    """All the steps of its start."""
    placed = rank.place(
        Place(
            deployment="m", index=1, node_ip="127.0.0.1", token=TOKEN, take=2, instance=CORES, directory=str(ledger), share=2, gather=2,
            listen="tcp",
        )  # fmt: skip
    )
    if begin.get("timeout_s", 10.0) >= 10.0:
        neighbours.call(placed.link)
    args = {"model": {"path": str(path)}, **ARGS, **STAGE}
    capacity = loading.check(parse(args))[0].capacity
    told: dict[str, Any] = {
        "config": args, "capacity": capacity, "dtype": "fp32", "environment": {}, "threads": 2, "stage": 1, "stages": 2, "rank": 0,
        "ranks": 2, "segment": placed.segment, "store": placed.store, "link": wire.address(neighbours.after), "peers": {},
        "timeout_s": 10.0, "step_timeout_s": 10.0, "model": str(path), **begin,
    }  # fmt: skip
    rank.begin(Begin(**told), lambda: None)
    rank.load(lambda done, total: None)


def refused_port(*_: object, **__: object) -> socket.socket:
    raise ConfigError("no port")


def hold_beside_another(hold: Callable[..., Any], which: int, ip: str, pair: tuple[int, int]) -> Any:
    """Of every pair of ports somebody has one."""
    with socket.create_server((ip, pair[which])):
        return hold(ip, pair)


PARTS: dict[str, type[Exception]] = {
    "ledger": Busy,
    "shared memory": OSError,
    **dict.fromkeys(("listener", "store", "port", "second port"), ConfigError),
    "keys": ConfigError,
    "next stage": WorkerLost,
    "stage before": WorkerLost,
    "collectives": Failing,
    "model": CheckpointError,
    "kernels": Failing,
    "weights": CheckpointError,
    "device load": Failing,
}


@pytest.mark.parametrize("part", [*PARTS, "nothing"])
def test_a_rank_of_a_group(part: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, begin = tmp_path / "cores", dict[str, Any]()
    rank, others, node = Rank(), Neighbours(), Ledger(ledger, instance(CORES))
    opened(rank, model, ledger, others)  # what torch and the loader keep for good is there now
    rank.close()
    others.close()
    taken = node.take(8, "another") if part == "ledger" else None
    before, rank, others = settled(), Rank(), Neighbours()
    with monkeypatch.context() as patch:
        if part == "shared memory":
            patch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError("none left")))
        elif part in ("listener", "store"):
            listen, left = wire.listen, iter(range(("listener", "store").index(part)))
            patch.setattr(wire, "listen", lambda *args, **kw: listen(*args, **kw) if next(left, None) is not None else refused_port())
        elif part in ("port", "second port"):
            patch.setattr(ports, "hold", partial(hold_beside_another, ports.hold, ("port", "second port").index(part)))
        elif part == "keys":
            begin = {"config": {"model": {"path": str(model)}, "devise": "cpu"}}
        elif part == "next stage":
            begin = {"link": "tcp:127.0.0.1:1", "timeout_s": 0.1}
        elif part == "stage before":
            begin = {"timeout_s": 0.1}
        elif part == "collectives":
            patch.setattr(shared_memory.SharedMemory, "__init__", fail)
        elif part == "model":
            begin = {"model": str(tmp_path)}
        elif part == "kernels":
            patch.setattr(device, "kernels", fail)
        elif part == "weights":
            begin = {"model": str(shutil.copytree(model, tmp_path / "cut"))}
            (tmp_path / "cut" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-8])
        elif part == "device load":
            patch.setattr(device.Cpu, "load", fail)
        if part == "nothing":
            opened(rank, model, ledger, others, **begin)
        else:
            with pytest.raises(PARTS[part]):
                opened(rank, model, ledger, others, **begin)
    if part != "ledger":
        assert rank.grant is not None and len(node.free()) == 6
    rank.abort()
    rank.close()
    rank.close()
    others.close()
    assert settled() == before
    if taken is not None:
        taken.release()
    assert len(node.free()) == 8
