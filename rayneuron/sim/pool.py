"""A prefill pool of the fleet: engines that compute prompts for those that go on with them, chosen as there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from rayneuron.engine.remote import Absent, Arrived, First, Lent, Loan, Prefill
from rayneuron.policies.cost import Costs
from rayneuron.policies.pools import Queue, choose, measured
from rayneuron.policies.prefix_index import PrefixIndex
from rayneuron.sim.clock import Clock
from rayneuron.sim.host import ExactHost, Gained
from rayneuron.sim.report import FleetReport
from rayneuron.sim.setup import Setup


class _Job:
    __slots__ = ("prefill", "tokens", "whose")

    def __init__(self, prefill: Prefill, whose: Asking, tokens: int) -> None:
        self.prefill, self.whose, self.tokens = prefill, whose, tokens


class _Peer:
    """A prefill engine, and what was asked of it that has not ended."""

    def __init__(self, number: int, host: ExactHost) -> None:
        self.number, self.host = number, host
        self.jobs: dict[int, _Job] = {}
        self.queued = 0


class PrefillPool:
    """Its engines live as long as the fleet. A prompt's first token comes at once, its KV `tail_s` later."""

    def __init__(self, clock: Clock, setup: Setup) -> None:
        pool = setup.pool
        assert pool is not None
        self.clock, self.hop_s, self.tail_s, self.local_tokens = clock, setup.hop_s, pool.tail_s, pool.local_tokens
        self.rates = measured(setup.profile, pool.profile)
        self.prompts = 0  # computed here
        costs, self._block = Costs(pool.profile), pool.capacity.block
        self._index = PrefixIndex()
        self._peers = [_Peer(i, ExactHost(clock, pool.capacity, costs, self._stepped, setup.caching)) for i in range(pool.nodes)]
        self._by_host = {peer.host: peer for peer in self._peers}
        self._keys = count(1)

    def tell(self, report: FleetReport) -> None:
        """What it has done."""
        report.cached_tokens += sum(peer.host.cached_tokens for peer in self._peers)
        report.pooled = self.prompts

    @property
    def open(self) -> int:
        """Prompts that were asked for, and have not ended."""
        return sum(len(peer.jobs) for peer in self._peers)

    def queues(self, prompt: int, hashes: Sequence[bytes]) -> list[Queue]:
        """What stands before a prompt at each."""
        groups, depth = self._index.depths(hashes), self._index.depth
        return [Queue(str(p.number), p.queued, max(1, prompt - depth(hashes, groups, p.number) * self._block)) for p in self._peers]

    def ask(self, prefill: Prefill, whose: Asking, name: str, prompt: int, uncached: int) -> None:
        """Have a prompt computed by one of them."""
        peer, key = self._peers[int(name)], next(self._keys)
        peer.jobs[key] = _Job(prefill, whose, uncached)
        peer.queued += uncached
        self.prompts += 1
        self.clock.at(self.clock.now_s + self.hop_s, self._ordered, peer, key, prompt)

    def _ordered(self, peer: _Peer, key: int, prompt: int) -> None:
        loan = Loan(key.to_bytes(8, "little"), _told)
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
