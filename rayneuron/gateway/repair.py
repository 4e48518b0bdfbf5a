"""What becomes of requests whose replica is lost: each choice that has not ended goes on at another, behind what it has got."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable

from msgspec.structs import replace

from rayneuron.frames import Card
from rayneuron.gateway.asking import ask_of
from rayneuron.gateway.books import Books
from rayneuron.gateway.ways import Way
from rayneuron.gateway_config import Replays
from rayneuron.policies.desk import GatewayDesk, TurnedAway
from rayneuron.policies.replay import Again, Cause, Effect, Fail
from rayneuron.types import Fault, FinishReason, TokenDelta


class Repair:
    """Decides by `policies.replay`, and asks the desk. Whoever may have killed its replica goes on alone among its like, so that nobody is
    blamed for another's doing, until it has got another token."""

    def __init__(
        self, books: Books, desk: GatewayDesk, deliver: Callable[[list[TokenDelta]], None], card: Callable[[], Card], rules: Replays
    ) -> None:  # fmt: skip
        self.keys = itertools.count(1)
        self.counts: Counter[tuple[str, str]] = Counter()  # by cause and outcome
        self.tokens = 0  # that went along
        self._books, self._desk, self._deliver, self._card, self._rules = books, desk, deliver, card, rules
        self._held: list[Way] = []  # while no replica is there
        self._served_s = time.monotonic()  # when one was that took orders
        self._suspects: deque[Way] = deque()
        self._trial: Way | None = None  # the suspect that is on its way
        self._blamed: set[int] = set()  # workers whose loss is put down to a suspect

    def cause(self, way: Way, said: Cause) -> Cause:
        """Of a loss, as `way` is told it: where a suspect was on trial there, it is that one's doing, and no sign against the others."""
        trial = self._trial
        if trial is not None and trial.worker is not None and trial.worker == way.worker:
            self._blamed.add(trial.worker)
        return said if way is trial or way.worker not in self._blamed else "silence"

    def again(self, way: Way, cause: Cause) -> None:
        """An attempt is lost."""
        for index in way.open:
            self.act(way, index, way.replays[index].lost(way.attempts.get(index, 0), cause), cause)
        self.forget(way)

    def act(self, way: Way, index: int, effect: Effect, cause: Cause) -> None:
        """Do what is to be done about a choice that has lost its replica."""
        replay = way.replays[index]
        if isinstance(effect, Fail):
            self.counts[cause, "failed"] += 1
            self.fail(way, [index], effect.why, "choice" if effect.status == 500 else "engine")
        elif isinstance(effect, Again):
            self.counts[cause, "again"] += 1
            self.tokens += len(replay.ids)
            tried = way.avoid if way.worker is None else way.avoid | {way.worker}
            alone = Way(next(self.keys), way.request, way.wishes, {index: replay}, alone=True, avoid=tried)
            del way.replays[index]
            self._books.take_in(alone, time.monotonic())
            if replay.suspect:
                self._suspects.append(alone)
                self._next()
            else:
                self._offer(alone)

    def fail(
        self, way: Way, indexes: list[int], error: str, fault: Fault, reason: FinishReason = "error", param: str | None = None
    ) -> None:
        """End choices of a request with an error."""
        end = TokenDelta(way.request.id, 0, [], finish_reason=reason, error=error, fault=fault, param=param)
        ends = [replace(end, index=i) for i in indexes]
        for index in indexes:
            way.replays[index].finish()
        self.settle(way)
        self._deliver(ends)

    def settle(self, way: Way) -> None:
        """Forget a way all of whose choices have ended; a suspect that has got a token is none any more."""
        if not way.open:
            self.forget(way)
        elif way is self._trial and way.heard:
            self._cleared()

    def forget(self, way: Way) -> None:
        """A way is over."""
        self._books.forget(way)
        self._desk.ended(way.key, way.heard, time.monotonic())
        for waiting in (self._held, self._suspects):
            if way in waiting:
                waiting.remove(way)
        if way is self._trial:
            self._cleared()

    def joined(self) -> None:
        """A replica is there."""
        held, self._held = self._held, []
        for way in held:
            self._offer(way)

    def hold(self, way: Way) -> None:
        """A way waits for the next replica."""
        self._held.append(way)

    def tick(self, now_s: float, there: bool) -> None:
        """Look for whom nobody came, here or at the desk. `there`: a replica is that takes orders."""
        self._served_s = now_s if there else self._served_s
        until_s = now_s - self._rules.hold_s
        for way in [way for way in self._books.ways.values() if way.worker is None and max(way.since_s, self._served_s) < until_s]:
            self.fail(way, way.open, "no replica of this model is ready", "engine")

    def _offer(self, way: Way) -> None:
        now_s = time.monotonic()
        if isinstance(self._desk.offer(ask_of(way, self._card(), now_s, again=True), now_s), TurnedAway):
            self.hold(way)

    def _next(self) -> None:
        if self._trial is None and self._suspects:
            self._trial = self._suspects.popleft()
            self._offer(self._trial)

    def _cleared(self) -> None:
        self._trial = None
        self._next()
