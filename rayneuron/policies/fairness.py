"""Whose turn it is: accounts share the devices by their weights, tiers of accounts go strictly one before the other.

Each account has a clock of the milliseconds it has been given, divided by its weight, and the one whose clock is furthest behind is next:
deficit round robin without a quantum. Who comes back with work takes up a little behind those who had some all the time: a burst of who
wants little is served at once, and nobody saves up for more.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from rayneuron.policies.cost import moved

_SAVED_MS = 2000.0  # of its share an account may be behind when it comes back


@dataclass(frozen=True, slots=True)
class AccountShare:
    """What an account is due: `weight` of its `tier` (0 goes first), and how much of it may run and wait here (None: any)."""

    weight: float = 1.0
    tier: int = 0
    max_running: int | None = None
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None


class Waiter(Struct, frozen=True):
    """One request that waits: `tokens` of its prompt, `ms` of a device. `again`: it was begun before, goes first and is not charged."""

    key: int
    account: str
    tokens: int
    ms: float
    again: bool = False


class _Account:
    __slots__ = ("clock", "output", "queue", "running", "share", "ticket", "waiting_ms", "waiting_tokens")

    def __init__(self, share: AccountShare) -> None:
        self.share = share
        self.queue: OrderedDict[int, Waiter] = OrderedDict()
        self.running = 0
        self.waiting_tokens = 0
        self.waiting_ms = 0.0
        self.clock = 0.0
        self.ticket = 0  # its place in the heap of its tier; others of it are old
        self.output = 0.0  # tokens of an answer of late

    @property
    def ready(self) -> bool:
        """Whether it has something that may run."""
        return bool(self.queue) and (self.share.max_running is None or self.running < self.share.max_running)


class _Tier:
    __slots__ = ("again", "clock", "heap", "waiting_ms")

    def __init__(self) -> None:
        self.again: OrderedDict[int, Waiter] = OrderedDict()
        self.heap: list[tuple[float, int, _Account]] = []
        self.clock = 0.0
        self.waiting_ms = 0.0


class Fairness:
    """The queue of one gateway for one model. `shares` by account; who is not in it has `other`, each for itself. `waiting`: by key."""

    def __init__(self, shares: Mapping[str, AccountShare], other: AccountShare) -> None:
        self._shares = shares
        self._other = other
        self._accounts: dict[str, _Account] = {}
        self._tiers: dict[int, _Tier] = {}
        self._order: list[int] = []
        self.waiting: dict[int, Waiter] = {}  # for others to read
        self._tickets = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, key: int) -> bool:
        return key in self.waiting

    @property
    def waiting_ms(self) -> float:
        """Of a device, of all that wait."""
        return sum(tier.waiting_ms for tier in self._tiers.values()) if self.waiting else 0.0

    @property
    def alone(self) -> bool:
        """Whether there never was more than one account."""
        return len(self._accounts) < 2

    def full(self, account: str, tokens: int) -> str | None:
        """Why an account may not let another request wait."""
        a = self._account(account)
        most, most_tokens = a.share.max_waiting, a.share.max_waiting_tokens
        if most is not None and len(a.queue) >= most:
            return f"{len(a.queue)} requests of this account wait; its limit is {most}"
        if most_tokens is not None and a.queue and a.waiting_tokens + tokens > most_tokens:
            return f"{a.waiting_tokens} prompt tokens of this account wait, and this request brings {tokens}; its limit is {most_tokens}"
        return None

    def add(self, entry: Waiter, first: bool = False) -> None:
        """Let a request wait; `first`: before the others of its account."""
        a = self._account(entry.account)
        tier = self._tiers[a.share.tier]
        self.waiting[entry.key] = entry
        tier.waiting_ms += entry.ms
        if entry.again:
            tier.again[entry.key] = entry
            return
        idle = not a.queue
        a.queue[entry.key] = entry
        a.waiting_tokens += entry.tokens
        a.waiting_ms += entry.ms
        if first:
            a.queue.move_to_end(entry.key, last=False)
        if idle:
            a.clock = max(a.clock, tier.clock - _SAVED_MS)
            self._line_up(a, tier)

    def head(self) -> int | None:
        """The request whose turn it is."""
        if not self.waiting:
            return None
        for number in self._order:
            tier = self._tiers[number]
            if tier.again:
                return next(iter(tier.again))
            while tier.heap:
                _, ticket, a = tier.heap[0]
                if ticket == a.ticket and a.ready:
                    return next(iter(a.queue))
                heapq.heappop(tier.heap)
        return None

    def take(self, key: int) -> bool:
        """A request goes, and its account is charged for it; whether it waited."""
        if (entry := self.waiting.get(key)) is None:
            return False
        a, tier = self._drop(entry)
        a.running += 1
        if not entry.again:
            tier.clock = max(tier.clock, a.clock)
            a.clock += entry.ms / a.share.weight
            if a.queue:
                self._line_up(a, tier)
        return True

    def drop(self, key: int) -> bool:
        """A request does not wait any more; whether it did."""
        if (entry := self.waiting.get(key)) is None:
            return False
        self._drop(entry)
        return True

    def _drop(self, entry: Waiter) -> tuple[_Account, _Tier]:
        del self.waiting[entry.key]
        a = self._accounts[entry.account]
        tier = self._tiers[a.share.tier]
        tier.waiting_ms -= entry.ms
        if tier.again.pop(entry.key, None) is None:
            del a.queue[entry.key]
            a.waiting_tokens -= entry.tokens
            a.waiting_ms = a.waiting_ms - entry.ms if a.queue else 0.0
        return a, tier

    def ended(self, account: str, more_ms: float = 0.0, tokens: int = 0) -> None:
        """A request that went has ended: it took so much more than it was charged for, and gave so many tokens."""
        a = self._account(account)
        a.running -= 1
        a.clock += more_ms / a.share.weight
        if tokens:
            a.output = moved(a.output, tokens)
        if a.queue:
            self._line_up(a, self._tiers[a.share.tier])

    def output(self, account: str) -> float:
        """Tokens of an account's answers of late; 0 before the first."""
        a = self._accounts.get(account)
        return 0.0 if a is None else a.output

    def ahead_ms(self, account: str, ms: float) -> float:
        """What will have been given to all when an account's next request, of `ms`, begins: tiers before its own, all that is to be done
        again, its own that waits, and of every other account what is due to it meanwhile."""
        mine = self._account(account)
        own = self._tiers[mine.share.tier]
        total = sum(entry.ms for entry in own.again.values())
        for number in self._order:
            if number < mine.share.tier:
                total += self._tiers[number].waiting_ms
        reached = max(mine.clock, own.clock - _SAVED_MS) + (mine.waiting_ms + ms) / mine.share.weight
        for a in self._accounts.values():
            if a is not mine and a.queue and a.share.tier == mine.share.tier:
                total += min(a.waiting_ms, max(0.0, reached - a.clock) * a.share.weight)
        return total + mine.waiting_ms

    def _account(self, name: str) -> _Account:
        found = self._accounts.get(name)
        if found is None:
            found = self._accounts[name] = _Account(self._shares.get(name, self._other))
            if found.share.tier not in self._tiers:
                self._tiers[found.share.tier] = _Tier()
                self._order = sorted(self._tiers)
        return found

    def _line_up(self, a: _Account, tier: _Tier) -> None:
        if a.ready:
            self._tickets += 1
            a.ticket = self._tickets
            heapq.heappush(tier.heap, (a.clock, a.ticket, a))
