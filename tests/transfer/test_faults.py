"""Seeded faults between the pools, one a run: the text is that of the request alone, in bounded time, and nothing is left behind."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from rayneuron.transfer.offers import LendingLimits
from tests.engine.test_fuzz import draw
from tests.engine.test_fuzz import solo as solo
from tests.serve.scripted import PATIENCE_S, eventually
from tests.transfer.pair import Decoding, Prefilling, at_baseline, open_engine
from tests.transfer.proxy import FROM_D, FROM_P, Fault, Proxy

LEASE_S, STALL_S, ASK_S = 1.2, 0.5, 1.0
BOUND_S = PATIENCE_S
WHATS = ("drop", "late", "double", "damage", "cut", "freeze")
POOL = 24  # requests, whose solo runs are known


class Behind:
    """A lender that is reached through a proxy."""

    def __init__(self, lender, proxy: Proxy) -> None:
        self._lender, self._proxy = lender, proxy

    @property
    def addresses(self):
        return (self._proxy.address,)

    def __getattr__(self, name):
        return getattr(self._lender, name)


class Bench:
    """Two pairs of listeners behind proxies, engines that live through all faults."""

    def __init__(self, stack: ExitStack, tiny, solo, way: str) -> None:
        self.proxies: list[Proxy] = []

        def between(lender):
            data = Proxy(lender.addresses[0], data=True)
            self.proxies.append(data)
            return Behind(lender, data)

        p = open_engine(tiny, rows=4, kv_tokens=384, chunk=16, cached=True, shared=True)
        self.p = Prefilling(p, LendingLimits(lease_s=LEASE_S), between)
        stack.callback(self.p.close)
        self.control = Proxy(self.p.offers.addresses[0], data=False)
        self.proxies.append(self.control)
        self.d = Decoding(open_engine(tiny, rows=6, chunk=16), way, stall_s=STALL_S)
        stack.callback(self.d.close)
        for proxy in self.proxies:
            stack.callback(proxy.close)
        rng = random.Random(99)
        self.requests = []
        while len(self.requests) < POOL:
            request = draw(rng, len(self.requests))
            if len(request.prompt_ids) > 1:
                self.requests.append(request)
        self.wanted = {(request.id, i): solo(request, i) for request in self.requests for i in range(request.params.n)}
        self.count = 0

    def connected(self) -> None:
        def met() -> bool:
            self.d.pulls.meet({"p": (self.control.address,)})
            return self.d.pulls.ready == ["p"]

        eventually(met, PATIENCE_S)

    def run(self, fault: Fault, rng: random.Random) -> str:
        """One fault; how it came out."""
        self.connected()
        before = self.d.counts.copy()
        (self.control if fault.kind else self.proxies[0]).begin(fault)
        chosen = rng.sample(self.requests, 3)
        self.count += 1
        named = [replace(request, id=f"{request.id}-{self.count}") for request in chosen]
        for request in named:
            self.d.loop.submit(request)
        self.d.heard.wait(named, BOUND_S)
        for mine, request in zip(named, chosen, strict=True):
            for index in range(request.params.n):
                deltas = self.d.heard.out.pop((mine.id, index))
                got = tuple(t for d in deltas for t in d.token_ids), deltas[-1].finish_reason
                assert got == self.wanted[request.id, index], (fault, request)
                assert sum(d.finish_reason is not None for d in deltas) == 1
        eventually(lambda: at_baseline(self.d.engine, self.d.loop), BOUND_S, lambda: (fault, self.d.engine.snapshot()))
        # P may have to wait for the lease of those it cannot hear any more.
        eventually(lambda: at_baseline(self.p.engine, self.p.loop), BOUND_S, lambda: (fault, self.p.engine.snapshot()))
        for proxy in self.proxies:
            proxy.heal()
        self.d.kv.clear()
        failed = self.d.counts["failed"] - before["failed"]
        return "unhit" if not fault.hit.is_set() else "local" if failed else "adopted"


def drawn(rng: random.Random) -> Fault:
    what = rng.choice(WHATS)
    late_s = rng.choice([0.05, STALL_S + 0.2, LEASE_S + 0.3])
    if rng.random() < 0.35:
        return Fault(what, after=rng.choice([0, 1, 40, 63, 64, 65, 300, 2_000, 5_000, 12_000]), late_s=late_s)
    kind = rng.choice(sorted({*FROM_D, *FROM_P} - {"Knock", "Welcome", "Declined", "Expired"}))
    return Fault(what, kind, nth=rng.choice([0, 0, 0, 1]), late_s=late_s)


def many(tiny, solo, count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    seen: dict[str, int] = {}
    with ExitStack() as stack:
        benches = [Bench(stack, tiny, solo, way) for way in ("sockets", "shared")]
        for i in range(count):
            fault = drawn(rng)
            came = benches[i % 2].run(fault, rng)
            seen[came] = seen.get(came, 0) + 1
    return seen


def test_a_sample_of_faults(tiny, solo):  # noqa: F811
    seen = many(tiny, solo, 40, 1)
    assert seen.get("local", 0) >= 3 and seen.get("adopted", 0) >= 3, seen


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand_faults(tiny, solo):  # noqa: F811
    seen = many(tiny, solo, 1000, 2)
    print(seen)
    assert seen.get("local", 0) > 150 and seen.get("adopted", 0) > 100, seen  # the busier the machine, the more are given up
