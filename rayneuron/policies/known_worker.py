"""One replica as a gateway knows it: the load it has told, and what was sent there since."""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct

from rayneuron.news import Pressure
from rayneuron.policies.cost import A_PROMPT, SOME_TOKENS, Costs, TimesNow
from rayneuron.policies.learned_pace import LearnedPace

_FADE_S = 10.0  # how often what is known of its pace is looked at where nothing comes


class Booking(Struct, frozen=True):
    """An order the replica has not acknowledged: what it will have to do, and since when."""

    key: int
    ms: float
    rows: int
    tokens: int
    at_s: float


class KnownWorker:
    """One replica. Its own word is as old as `at_s`; orders that `load.seen` does not count are added to it."""

    __slots__ = (
        *("_added_ms", "_prompt_ms", "accepting", "at_s", "behind_ms", "beside", "bit", "booked_ms", "booked_rows"),
        *("booked_tokens", "bookings", "costs", "extra", "free", "keys", "kv_tokens", "level", "load", "ms", "name", "now", "number"),
        *("orders", "pace", "place", "pooled", "rows", "step_ms", "turn_ms", "until_s", "waits_since"),
    )

    def __init__(
        self, number: int, name: str, costs: Costs, kv_tokens: int, load: Pressure, now_s: float, pooled: bool = False
    ) -> None:  # fmt: skip
        self.number = number
        self.name = name
        self.costs = costs
        self.kv_tokens = kv_tokens
        self.pooled = pooled
        self._prompt_ms = costs.prefill(min(A_PROMPT, costs.profile.lengths[-1]), 0)[0]
        self.load = load
        self.at_s = now_s
        self.pace = LearnedPace(now_s)
        self.now: TimesNow | None = None  # None: as when it came
        self.accepting = True
        self.orders = 0
        self.bookings: OrderedDict[int, Booking] = OrderedDict()  # by the order's number
        self.waits_since: float | None = None  # when the oldest of these was sent
        self.booked_ms = 0.0
        self.booked_rows = self.booked_tokens = 0
        self.keys: set[int] = set()  # all that is there, acknowledged or not
        self.bit = 0  # in sets of workers of the prefix index
        self.level = self.place = -1  # among all, -1: it may not be chosen
        self.ms = 0.0  # what level that is
        self._count()

    def waits_ms(self, now_s: float) -> float:
        """What it has to do before a prompt that is sent now. On this, and not on a step that is under way, hangs whether it is sent:
        waiting here would not make that less."""
        until_s = self.until_s
        return self.behind_ms + 1e3 * (until_s - now_s) if until_s > now_s else self.behind_ms

    def queue_ms(self, now_s: float) -> float:
        """Until a prompt that is sent now would begin."""
        return self.waits_ms(now_s) + (0.0 if self.until_s > now_s else self.turn_ms)

    def typical_ms(self, now_s: float) -> float:
        """What everybody loses by one more request, of the kind by which replicas are compared."""
        until_s = self.until_s
        queue = self.behind_ms + (1e3 * (until_s - now_s) if until_s > now_s else self.turn_ms)
        return queue + self._prompt_ms + self._added_ms

    def own_ms(self, new: int, cached: int, known_ms: float) -> float:
        """What a prompt that is sent now will take by what its steps take now, `known_ms` by `costs`."""
        return known_ms if self.now is None else self.now.prefill_ms(self.costs, new, cached, self.rows, self.load.longest)

    def _count(self) -> None:
        """What choices ask, which are far more than changes: `until_s`: it has done by then what it told of; `behind_ms`: what is sent
        there since, and waits for rows; `rows` that decode there or will, `extra` that have no row; `step_ms` of a decode step, `turn_ms`
        of what is left of one that is under way; `beside`: what one more adds to it; `free` tokens."""
        load, costs = self.load, self.costs
        self.rows = rows = load.rows + self.booked_rows
        self.extra = extra = load.waiting + self.booked_rows - load.slots_free
        self.free = load.kv_free - self.booked_tokens
        self.until_s = self.at_s + load.backlog_ms / 1e3
        step_ms, self.beside, self._added_ms = costs.stands(rows, load.longest)
        self.step_ms, self.turn_ms = step_ms, 0.5 * step_ms if rows > 0 else 0.0
        self.behind_ms = self.booked_ms
        if extra >= 0:
            slot_ms = load.slot_ms or SOME_TOKENS * step_ms  # its rows are booked, not taken yet
            self.behind_ms += slot_ms * (extra + 1)

    def book(self, key: int, ms: float, rows: int, tokens: int, now_s: float) -> int:
        """An order goes there; its number."""
        self.orders += 1
        if self.waits_since is None:
            self.waits_since = now_s
        self.bookings[self.orders] = Booking(key, ms, rows, tokens, now_s)
        self.booked_ms += ms
        self.booked_rows += rows
        self.booked_tokens += tokens
        self.keys.add(key)
        self._count()
        return self.orders

    def heard(self, load: Pressure, now_s: float) -> None:
        """What it says of itself, which counts in all orders up to `seen`."""
        self.load, self.at_s = load, now_s
        while self.bookings and next(iter(self.bookings)) <= load.seen:
            self._counted(self.bookings.popitem(last=False)[1])
        if now_s - self.pace.known_s > _FADE_S:
            self.pace.fade(now_s)
        self._count()

    def unbook(self, key: int) -> bool:
        """A request is not there any more; whether that changes what it has to do, which it has not acknowledged then."""
        self.keys.discard(key)
        for number, booking in self.bookings.items():
            if booking.key == key:
                del self.bookings[number]
                self._counted(booking)
                self._count()
                return True
        return False

    def _counted(self, booking: Booking) -> None:
        self.booked_ms -= booking.ms
        self.booked_rows -= booking.rows
        self.booked_tokens -= booking.tokens
        if self.bookings:
            self.waits_since = next(iter(self.bookings.values())).at_s
        else:
            self.booked_ms, self.waits_since = 0.0, None
