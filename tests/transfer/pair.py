"""A prefill and a decode replica in this process, each with its engine, joined by real sockets and memory."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rayneuron.devices.cpu.device import Cpu
from rayneuron.devices.queued import Queued
from rayneuron.engine.engine import Engine
from rayneuron.engine.loop import EngineLoop
from rayneuron.transfer.layout import KvLayout, layout_of
from rayneuron.transfer.lending import Lender
from rayneuron.transfer.offers import LendingLimits, Offers
from rayneuron.transfer.pulling import Puller
from rayneuron.transfer.pulls import Pulls
from rayneuron.types import Request, Snapshot, TokenDelta
from tests.engine.test_fuzz import build
from tests.serve.scripted import PATIENCE_S, eventually

TOKEN = b"secret of these tests"


def open_engine(path: Path, *, rows: int = 4, block: int = 16, **how: Any) -> Engine:
    """As tests/engine/test_fuzz.py builds one; `shared`: with memory others may read."""
    return build(path, rows, block=block, **how)


def cpu(engine: Engine) -> Cpu:
    device = engine.runner.device  # type: ignore[attr-defined]
    return device._device if isinstance(device, Queued) else device


def layout(engine: Engine, **other: Any) -> KvLayout:
    said = {"model": "tiny", "dtype": str(cpu(engine).dtype), "kv_dtype": str(cpu(engine).kv_dtype), "quantization": "", "numerics": "this"}
    return layout_of(engine.runner.arch, engine.capacity.space, cpu(engine).kv_memory(), **said | other)  # type: ignore[attr-defined]


class Heard:
    """What an engine has delivered, by choice."""

    def __init__(self) -> None:
        self.out: dict[tuple[str, int], list[TokenDelta]] = {}
        self._news = threading.Condition()

    def __call__(self, deltas: list[TokenDelta]) -> None:
        with self._news:
            for delta in deltas:
                self.out.setdefault((delta.request_id, delta.index), []).append(delta)
            self._news.notify_all()

    def ended(self, key: tuple[str, int]) -> bool:
        return bool(self.out.get(key)) and self.out[key][-1].finish_reason is not None

    def wait(self, requests: list[Request], within_s: float = 60) -> None:
        keys = [(request.id, index) for request in requests for index in range(request.params.n)]
        with self._news:
            assert self._news.wait_for(lambda: all(map(self.ended, keys)), within_s), [key for key in keys if not self.ended(key)]


class Prefilling:
    """A prefill replica."""

    def __init__(self, engine: Engine, limits: LendingLimits | None = None, between: Callable[[Any], Any] = lambda lender: lender) -> None:
        self.engine = engine
        epoch = random.getrandbits(63)
        self.loop = EngineLoop(engine, lambda deltas: self.offers.deliver(deltas))
        self.lender = Lender(cpu(engine).kv_memory(), TOKEN, epoch, "127.0.0.1")
        self.offers = Offers(self.loop, layout(engine), [between(self.lender)], TOKEN, epoch, "127.0.0.1", limits)

    def close(self) -> None:
        self.offers.close()
        self.loop.close()


class Decoding:
    """A decode replica. `prefilled`: tokens it computed in prefill steps; `kv`: what it had when a prompt had arrived, by request."""

    def __init__(self, engine: Engine, way: str = "auto", **options: Any) -> None:
        self.engine, self.heard, self.counts = engine, Heard(), Counter()
        self.kv: dict[str, torch.Tensor] = {}
        mine, stall_s = layout(engine), options.pop("stall_s", 5.0)
        puller = Puller(cpu(engine).kv_memory(), mine, TOKEN, way=way, stall_s=stall_s)
        options = {"local_tokens": 0, "load": Snapshot} | options
        self.pulls = engine.scheduler.prefills = Pulls([puller], mine, TOKEN, stall_s=stall_s, **options)
        self._watch(engine)
        self.loop = EngineLoop(engine, self.heard)

    def _watch(self, engine: Engine) -> None:
        device, arrived = engine.runner.device, engine.scheduler.arrived  # type: ignore[attr-defined]
        start = device.start

        def started(shape: Any, batch: Any) -> Any:
            self.counts[shape.tag] += 1
            return start(shape, batch)

        def adopted(key: str, whole: bool) -> Any:
            sequence = arrived(key, whole)
            self.counts["adopted" if whole else "failed"] += 1
            if sequence is not None and whole:
                self.kv[sequence.request.id] = held(engine, sequence.hold.blocks, sequence.prompt_len)
            return sequence

        device.start, engine.scheduler.arrived = started, adopted

    def meet(self, *found: Prefilling) -> None:
        self.pulls.meet({str(i): one.offers.addresses for i, one in enumerate(found)})
        eventually(lambda: len(self.pulls.ready) == len(found), PATIENCE_S, lambda: self.pulls.ready)

    def close(self) -> None:
        self.loop.close()


def held(engine: Engine, blocks: list[int], length: int) -> torch.Tensor:
    """KV of the first positions: [layers, heads, 2, length, dim]."""
    units = engine.runner.device.kv_read(blocks[: engine.capacity.space.width(length)])  # type: ignore[attr-defined]
    return units.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :length].clone()


def at_baseline(engine: Engine, loop: EngineLoop) -> bool:
    """Nothing is held, nothing is pinned, and the books balance."""

    def look(engine: Engine) -> bool:
        engine.check_ledger()
        s = engine.snapshot()
        nobodys = s.blocks_free + s.blocks_cached + s.blocks_limbo == s.blocks_total
        return nobodys and (s.running, s.waiting, s.remote, s.blocks_pinned, s.slots_free) == (0, 0, 0, 0, s.slots_total)

    return loop.ask(look).result(30)


class Pair:
    """One of each, opened in `stack`."""

    def __init__(
        self, stack: ExitStack, p: Engine, d: Engine, way: str = "auto", limits: LendingLimits | None = None, **options: Any
    ) -> None:
        self.p = Prefilling(p, limits)
        stack.callback(self.p.close)
        self.d = Decoding(d, way, **options)
        stack.callback(self.d.close)
        self.d.meet(self.p)

    def run(self, *requests: Request) -> dict[tuple[str, int], tuple[tuple[int, ...], str]]:
        for request in requests:
            self.d.loop.submit(request)
        self.d.heard.wait(list(requests))
        return {
            key: (tuple(t for d in deltas for t in d.token_ids), deltas[-1].finish_reason or "") for key, deltas in self.d.heard.out.items()
        }

    def at_baseline(self) -> None:
        for one in (self.d, self.p):
            eventually(lambda one=one: at_baseline(one.engine, one.loop), PATIENCE_S, lambda one=one: one.engine.snapshot())
        assert not self.p.offers.live
