"""A prefill pool of the fleet: engines that compute prompts for those that go on with them, chosen as there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from rayneuron.engine.remote import Absent, Arrived, First, Lent, Loan, Prefill
from rayneuron.policies.cost import Costs
from rayneuron.policies.pools import Queue, choose, measured
from rayneuron.policies.prefix_index import PrefixIndex
from rayneuron.sim.clock import Clock
from rayneuron.sim.host import ExactHost, Gained
from rayneuron.sim.parts import FleetNode, within
from rayneuron.sim.replicas import FleetSize, by_prompts
from rayneuron.sim.report import FleetReport
from rayneuron.sim.setup import Elastic, Setup


class _Job:
    __slots__ = ("prefill", "prompt", "tokens", "whose")

    def __init__(self, prefill: Prefill, whose: Asking, prompt: int, tokens: int) -> None:
        self.prefill, self.whose, self.prompt, self.tokens = prefill, whose, prompt, tokens


@dataclass(slots=True, eq=False)
class _Peer(FleetNode):
    """A prefill engine, and what was asked of it that has not ended; `queued`: tokens of that which it must compute."""

    jobs: dict[int, _Job] = field(default_factory=dict)
    queued: int = 0


class PrefillPool:
    """A prompt's first token comes at once, its KV `tail_s` later."""

    def __init__(self, clock: Clock, setup: Setup) -> None:
        pool = setup.pool
        assert pool is not None
        self.clock, self.hop_s, self.tail_s, self.local_tokens = clock, setup.hop_s, pool.tail_s, pool.local_tokens
        self.rates = measured(setup.profile, pool.profile)
        self.prompts = 0  # computed here
        self._costs, self._capacity, self._caching, self._sizes = Costs(pool.profile), pool.capacity, setup.caching, pool.sizes
        self._index = PrefixIndex()
        self.peers: dict[int, _Peer] = {}
        self._by_host: dict[ExactHost, _Peer] = {}
        self._numbers, self._keys = count(), count(1)
        self._cached_tokens, self._lives = 0, list[tuple[float, float]]()  # of those who have gone: from when until when they were there
        for _ in range(pool.nodes):
            self._open()
        made = (self.peers, self._open, self._gone, self._wanted)
        self._size = FleetSize(clock, pool.elastic, *made) if pool.elastic is not None else None

    def look(self) -> float:
        """As `FleetSize.look`."""
        swept = self._index.sweep()
        due_s = self._size.look() if self._size is not None else inf
        return self.clock.now_s if swept else due_s

    def tell(self, report: FleetReport) -> None:
        """What it has done."""
        for peer in self.peers.values():
            self._count(peer)
        report.cached_tokens += self._cached_tokens
        report.pooled = self.prompts
        report.prefill_engines = within(self._lives, report.seconds) / report.seconds if report.seconds else 0.0

    @property
    def open(self) -> int:
        """Prompts that were asked for, and have not ended."""
        return sum(len(peer.jobs) for peer in self.peers.values())

    def queues(self, prompt: int, hashes: Sequence[bytes]) -> list[Queue]:
        """What stands before a prompt at each."""
        groups, depth, block = self._index.depths(hashes), self._index.depth, self._capacity.block
        peers = [peer for peer in self.peers.values() if peer.host.accepting]
        return [Queue(str(p.number), p.queued, max(1, prompt - depth(hashes, groups, p.number) * block)) for p in peers]

    def _open(self) -> None:
        host, number = ExactHost(self.clock, self._capacity, self._costs, self._stepped, self._caching), next(self._numbers)
        self.peers[number] = self._by_host[host] = _Peer(number, host, self.clock.now_s)

    def _gone(self, peer: _Peer) -> None:
        """One that takes no more has computed what it was asked for; it stays until that has been read."""
        if not peer.host.scheduler.blocks.pinned:
            del self.peers[peer.number], self._by_host[peer.host]
            self._index.forget(peer.number)
            self._count(peer)

    def _count(self, peer: _Peer) -> None:
        self._lives.append((peer.since_s, self.clock.now_s))
        self._cached_tokens += peer.host.cached_tokens

    def _wanted(self, _: Elastic, staying: list[_Peer]) -> int:
        blocks = {peer.number: peer.host.scheduler.blocks for peer in staying}
        tokens = {peer.number: float(sum([job.prompt for job in peer.jobs.values()])) for peer in staying}
        return by_prompts(self._sizes, {number: (tokens[number], b.pinned / b.space.blocks) for number, b in blocks.items()})

    def ask(self, prefill: Prefill, whose: Asking, name: str, prompt: int, uncached: int) -> None:
        """Have a prompt computed by one of them."""
        peer, key = self.peers[int(name)], next(self._keys)
        peer.jobs[key] = _Job(prefill, whose, prompt, uncached)
        peer.queued += uncached
        peer.under_way += 1
        self.prompts += 1
        self.clock.at(self.clock.now_s + self.hop_s, self._ordered, peer, key, prompt)

    def _ordered(self, peer: _Peer, key: int, prompt: int) -> None:
        loan = Loan(key.to_bytes(8, "little"), _told)
        peer.under_way -= 1
        peer.host.submit(key, prompt, 1, peer.jobs[key].prefill.hashes, loan=loan)

    def _stepped(self, host: ExactHost, told: list[Gained]) -> None:
        peer, now_s = self._by_host[host], self.clock.now_s
        if (news := host.news()) is not None and not self._index.hear(peer.number, news):
            self._index.hear(peer.number, host.everything())
        for gained in told:
            job = peer.jobs.pop(gained.key)
            peer.queued -= job.tokens
            there_s = now_s + self.hop_s
            self.clock.at(there_s, job.whose.came, First(job.prefill.key, []))
            self.clock.at(there_s + self.tail_s, job.whose.came, Arrived(job.prefill.key))
            self.clock.at(there_s + self.tail_s, host.unpin, gained.key.to_bytes(8, "little"))


class Asking:
    """The prefills (`engine.remote.Prefills`) of one engine of the fleet."""

    def __init__(self, pool: PrefillPool, host: ExactHost) -> None:
        self.wake: Callable[[], None] = host.interrupt
        self._pool, self._host = pool, host
        self._came: deque[First | Arrived | Absent] = deque()

    def ask(self, prefill: Prefill) -> bool:
        """As `Prefills`."""
        scheduler, pool = self._host.scheduler, self._pool
        prompt = self._host.prompt(prefill.key)
        here = Queue("", scheduler.waiting_tokens, prompt - prefill.known, len(scheduler.running))
        queues = pool.queues(prompt, prefill.hashes)
        chosen = choose(here, queues, pool.rates, pool.local_tokens)
        if chosen.peer:
            pool.ask(prefill, self, chosen.peer, prompt, next(queue.uncached for queue in queues if queue.name == chosen.peer))
        return bool(chosen.peer)

    def kept(self, why: str) -> None:
        """As `Prefills`."""

    def cancel(self, key: str) -> None:
        """As `Prefills`: the other engine computes it to its end."""

    def take(self) -> list[First | Arrived | Absent]:
        """As `Prefills`."""
        taken = list(self._came)
        self._came.clear()
        return taken

    def close(self) -> None:
        """As `Prefills`."""

    def came(self, event: First | Arrived) -> None:
        """Something is here."""
        if self._host.alive:
            self._came.append(event)
            self.wake()


def _told(lent: Lent) -> None:
    """Blocks travel as they are computed; only when all have is of interest here."""
