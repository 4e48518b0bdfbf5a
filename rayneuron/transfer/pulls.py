"""A decode replica's side: prompts that others compute, and their KV, pulled as it grows and counted only once it is committed.

One thread owns all that is asked; the engine, the channels, the pulls and the clock only tell it what has happened.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from rayneuron.engine.remote import Absent, Arrived, First, Prefill
from rayneuron.policies.pools import Queue, Rates, choose
from rayneuron.transfer.desk import Clerk
from rayneuron.transfer.layout import KvLayout
from rayneuron.transfer.messages import (
    Abandon,
    Accepted,
    Bid,
    Commit,
    Committed,
    Declined,
    Expired,
    FirstTokens,
    Prefixes,
    Pulse,
    Watermark,
    Welcome,
)
from rayneuron.transfer.peers import PrefillPeer
from rayneuron.transfer.pulling import Errand, Halting, PullEnd, PullsKv
from rayneuron.transfer.records import Fetching
from rayneuron.transfer.roster import Roster
from rayneuron.transfer.tickets import ClaimEvent, asking, claim_step
from rayneuron.types import Snapshot

OFTEN_S = 0.03  # how late a silence may be seen while something is fetched


class Pulls:
    """`engine.remote.Prefills`. `pullers`: one a worker; `local_tokens`: prompts of so many uncached tokens stay here (None: as `rates`
    say); `load`: of the engine, now."""

    def __init__(
        self,
        pullers: Sequence[PullsKv],
        layout: KvLayout,
        token: bytes,
        *,
        stall_s: float = 5.0,
        local_tokens: int | None = None,
        rates: Rates | None = None,
        load: Callable[[], Snapshot] = Snapshot,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.prefills: Counter[tuple[str, str]] = Counter()  # where, and why
        self.fallbacks: Counter[str] = Counter()  # by the stage that failed
        self.counts: Counter[str] = Counter()
        self.rates = rates
        self._pullers, self._layout = pullers, layout
        self._stall_s, self._local_tokens, self._load = stall_s, local_tokens, load
        self._out: deque[First | Arrived | Absent] = deque()
        self._fetching: dict[str, Fetching] = {}
        self._closing = False
        self._roster = Roster(token, layout, lambda peer, message: self._desk.put(self._heard, peer, message))
        self._desk = Clerk("rayneuron-pulls", self._tick, lambda: bool(self._fetching), OFTEN_S)

    @property
    def ready(self) -> list[str]:
        """Prefill replicas that can be asked, by name."""
        return [peer.name for peer in self._roster.welcomed()]

    def meet(self, found: Mapping[str, Sequence[str]]) -> None:
        """These prefill replicas are there, by name, at these addresses; those not connected are called. Who has gone is told by its
        channel."""
        self._desk.put(self._roster.meet, {name: tuple(addresses) for name, addresses in found.items()})

    def ask(self, prefill: Prefill) -> bool:
        """As `Prefills`."""
        prompt, load = len(prefill.request.prompt_ids), self._load()
        here = Queue("", load.waiting_tokens, prompt - prefill.known, load.running)
        queues = self._roster.queues(prompt, prefill.hashes)
        chosen = choose(here, queues, self.rates, self._local_tokens)
        peer = None if self._closing else self._roster.get(chosen.peer)
        if peer is None:
            self.kept(chosen.why if not chosen.peer else "nobody")
            return False
        self.prefills["remote", chosen.why] += 1
        self.counts["queries"] += prompt - prefill.known
        peer.booked[prefill.key] = next(queue.uncached for queue in queues if queue.name == chosen.peer)
        self._desk.put(self._ask, prefill, peer)
        return True

    def kept(self, why: str) -> None:
        """As `Prefills`."""
        self.prefills["local", why] += 1

    def cancel(self, key: str) -> None:
        """As `Prefills`."""
        self._desk.put(self._cancel, key)

    def take(self) -> list[First | Arrived | Absent]:
        """As `Prefills`."""
        taken = []
        while self._out:
            taken.append(self._out.popleft())
        return taken

    def close(self) -> None:
        """As `Prefills`."""
        self._desk.put(self._end)
        self._desk.close(lambda: self._closing and not self._fetching)
        for puller in self._pullers:
            puller.close()

    # What one thread does

    def _end(self) -> None:
        self._closing = True
        for fetching in list(self._fetching.values()):
            self._event(fetching, "cancel")
        self._roster.close()

    def _cancel(self, key: str) -> None:
        if (fetching := self._fetching.get(key)) is not None:
            fetching.cancelled = True
            self._tell(fetching, "cancel", "cancelled")

    def _heard(self, peer: PrefillPeer, message: Any) -> None:
        match message:
            case None:
                self._lost(peer)
            case Accepted():
                fetching = self._of(peer, key=message.key)
                if fetching is not None and fetching.fetch.phase == "asked":
                    fetching.ticket = message.ticket
                    self._event(fetching, "accepted")
            case Declined():
                self._tell(self._of(peer, key=message.key), "declined", message.why)
            case Watermark():
                fetching = self._of(peer, message.ticket)
                if fetching is not None and self._sound(fetching, message.settled):
                    self._event(fetching, "watermark", message.settled)
            case FirstTokens():
                fetching = self._of(peer, message.ticket)
                if fetching is not None:
                    fetching.first = fetching.first or message.deltas
                    self._event(fetching, "first")
            case Committed():
                self._tell(self._of(peer, message.ticket), "committed")
            case Expired():
                self._tell(self._of(peer, message.ticket), "expired", message.why)
            case Pulse():
                for fetching in self._with(peer):
                    if not fetching.ticket:
                        continue
                    if (settled := message.tickets.get(fetching.ticket)) is None:
                        self._tell(fetching, "expired", "its ticket is not alive")
                    elif self._sound(fetching, settled):
                        self._event(fetching, "beat", settled)
            case Prefixes(news):
                self._roster.learn(peer, news)
            case Welcome():
                pass

    def _ask(self, prefill: Prefill, peer: PrefillPeer) -> None:
        now = time.monotonic()
        fetching = Fetching(prefill, peer, asking(len(prefill.request.prompt_ids), prefill.known, now))
        self._fetching[prefill.key] = fetching
        self._say_ask(fetching)

    def _say_ask(self, fetching: Fetching) -> None:
        request = fetching.prefill.request
        remaining_s = None if request.deadline_s is None else request.deadline_s - time.monotonic()
        asked = Bid(fetching.prefill.key, replace(request, arrival_s=0.0, deadline_s=None), remaining_s)
        if not fetching.peer.say(asked):
            self._tell(fetching, "lost", f"{fetching.peer.name} is gone")

    def _lost(self, peer: PrefillPeer) -> None:
        self._roster.lose(peer)
        for fetching in self._with(peer):
            self._tell(fetching, "lost", f"{peer.name} is gone")
        if peer.welcome is not None:
            for puller in self._pullers:
                puller.forget(peer.welcome.epoch)

    def _tick(self, now: float) -> None:
        for fetching in [fetching for fetching in self._fetching.values() if now >= fetching.fetch.until]:
            self._tell(fetching, "tick", f"{fetching.peer.name} has said nothing for too long")
        self._roster.sweep()
        for peer in self._roster.welcomed():
            if peer.welcome is not None and now >= peer.pulsed + min(peer.welcome.lease_s / 6, self._stall_s / 4):
                peer.pulsed = now
                tickets = [fetching.ticket for fetching in self._with(peer) if fetching.ticket]
                if tickets:
                    peer.say(Pulse(dict.fromkeys(tickets, 0)))

    def _with(self, peer: PrefillPeer) -> list[Fetching]:
        return [fetching for fetching in self._fetching.values() if fetching.peer is peer]

    def _of(self, peer: PrefillPeer, ticket: bytes = b"", key: str = "") -> Fetching | None:
        """Whom a message of `peer` is about."""
        if key:
            fetching = self._fetching.get(key)
            return fetching if fetching is not None and fetching.peer is peer else None
        return next((fetching for fetching in self._with(peer) if ticket and fetching.ticket == ticket), None)

    def _sound(self, fetching: Fetching, settled: int) -> bool:
        """Whether a watermark can be meant; whoever says others is not to be trusted."""
        total = fetching.fetch.total
        if settled == total or (0 <= settled < total and settled % self._layout.block == 0):
            return True
        fetching.peer.close()
        return False

    def _tell(self, fetching: Fetching | None, event: ClaimEvent, why: str = "") -> None:
        if fetching is not None:
            fetching.why = why or fetching.why
            self._event(fetching, event)

    def _event(self, fetching: Fetching, event: ClaimEvent, value: int = 0) -> None:
        other = self._roster.other(fetching.peer)
        if fetching.fetch.phase != "ending":
            fetching.stage = "streamed" if fetching.fetch.phase == "pulling" and fetching.fetch.streamed else fetching.fetch.phase
        fetching.fetch, actions = claim_step(fetching.fetch, event, time.monotonic(), self._stall_s, value, other=other is not None)
        key = fetching.prefill.key
        for action in actions:
            match action:
                case "give":
                    fetching.peer.booked.pop(key, None)
                    self._say(First(key, fetching.first))
                case "pull":
                    self._pull(fetching)
                case "stop":
                    fetching.stop.set()
                case "commit":
                    fetching.peer.say(Commit(fetching.ticket))
                case "abandon":
                    fetching.peer.say(Abandon(key, fetching.why))
                case "next":
                    self._turn(fetching, other)
                case "adopt" | "fail":
                    self._over(fetching, action)

    def _turn(self, fetching: Fetching, other: PrefillPeer | None) -> None:
        key = fetching.prefill.key
        prompt = fetching.peer.booked.pop(key, 0)
        self.counts["other"] += 1
        fetching.ticket, fetching.first = b"", []
        if other is None:
            self._tell(fetching, "lost", "nobody else is there any more")
            return
        fetching.peer = other
        other.booked[key] = prompt
        self._say_ask(fetching)

    def _pull(self, fetching: Fetching) -> None:
        fetch, size, welcome = fetching.fetch, self._layout.block, fetching.peer.welcome
        assert welcome is not None
        first, end = fetch.pulled // size, -(-fetch.settled // size)
        errand = Errand(welcome, fetching.ticket, first, end, fetching.prefill.blocks[first:end])
        fetching.awaited, fetching.outcome, fetching.stop = len(self._pullers), "pulled", Halting()

        def told(outcome: PullEnd, why: str, size: int) -> None:
            self._desk.put(self._pulled, fetching, fetch.settled, outcome, why, size)

        for puller in self._pullers:
            puller.begin(errand, fetching.stop, told)

    def _pulled(self, fetching: Fetching, settled: int, outcome: PullEnd, why: str, size: int) -> None:
        """One worker has said how its pull went; when all have, the pull is over."""
        self.counts["bytes"] += size
        if outcome != "pulled":
            self.counts[outcome] += 1
            if fetching.outcome in ("pulled", "halted"):  # what began it, not those it has stopped
                fetching.outcome, fetching.why = outcome, why
            fetching.stop.set()  # the other workers' parts are of no use alone
        fetching.awaited -= 1
        if not fetching.awaited:
            ended = fetching.outcome
            self._event(fetching, ended if ended in ("pulled", "stale") else "broken", settled)

    def _over(self, fetching: Fetching, action: str) -> None:
        key = fetching.prefill.key
        fetching.peer.booked.pop(key, None)
        del self._fetching[key]
        how = "adopted" if action == "adopt" else "cancelled" if fetching.cancelled else "fallbacks"
        self.counts[how] += 1
        if how == "adopted":
            self.counts["hits"] += fetching.fetch.total - fetching.fetch.known
        elif how == "fallbacks":
            self.fallbacks[fetching.stage] += 1
        self._say(Arrived(key) if action == "adopt" else Absent(key, fetching.why))

    def _say(self, news: First | Arrived | Absent) -> None:
        self._out.append(news)
        self.wake()
