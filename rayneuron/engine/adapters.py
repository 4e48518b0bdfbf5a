"""Which adapters there are, which of them lie in the device's slots, and who may begin: a ledger of the engine's thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rayneuron.errors import RequestError, UnknownModel

if TYPE_CHECKING:
    from rayneuron.engine.sequence import Sequence as Choice
    from rayneuron.types import Request


class Adapters:
    """Adapters are known by content; a name is what clients say for one, and may come to mean another.

    A choice that runs pins the slot of its adapter. Another adapter takes a free slot, or that of the one nobody runs with which began
    last longest ago. The first in line for whom there is neither keeps the slot back that was begun on longest ago: nobody begins on it
    until it is free, so that whoever waits comes to its turn; who needs no other slot may pass.
    `slots`: of the device; `most`: adapters kept on the host; `drop`: told of one that nobody needs any more; `places`: where no slot ever
    changes, in which each adapter lies: all of them.
    """

    def __init__(
        self, slots: int = 0, most: int = 0, drop: Callable[[str], None] = lambda identity: None,
        places: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.slots, self.most = slots if places is None else len(places), most
        self.names: Mapping[str, str] = {}  # replaced, never changed: any thread may read it
        self.kept: frozenset[str] = frozenset()  # likewise: contents on the host
        self._drop = drop
        self._users: Counter[str] = Counter()  # live requests
        self._pins: Counter[str] = Counter()  # choices that run
        self._places = dict(places or {})  # who has which slot; who was begun on last comes last
        self._free = list(range(slots)) if places is None else []
        self._installs: dict[int, str] = {}  # what is to be put into slots before the next step

    def check(self, identity: str) -> None:
        """Raise RequestError where a request cannot have this adapter. For any thread."""
        if not self.slots:
            raise RequestError("this server has no adapters (lora of its deployment file)", param="model")
        if identity not in self.kept:
            raise UnknownModel("The adapter was unloaded a moment ago.", param="model")

    def name(self, name: str, identity: str) -> None:
        """From now on `name` means this one, which the host keeps."""
        before = self.names.get(name)
        self.names = {**self.names, name: identity}
        self.kept |= {identity}
        self._sweep(before)

    def forget(self, name: str) -> None:
        """A name means nothing any more. Requests that have begun with its adapter go on with it."""
        identity = self.names[name]
        self.names = {known: other for known, other in self.names.items() if known != name}
        self._sweep(identity)

    def opened(self, request: Request) -> None:
        """A request is in the engine's books."""
        if request.adapter is not None:
            self._users[request.adapter] += 1

    def closed(self, request: Request) -> None:
        """It is no more."""
        if request.adapter is not None:
            self._users[request.adapter] -= 1
            self._sweep(request.adapter)

    def first(self, waiting: Sequence[Choice]) -> Choice | None:
        """The first in line who may begin now; None where there is nobody."""
        kept_back: str | None = None
        for choice in waiting:
            identity = choice.request.adapter
            if identity is None or (identity in self._places and identity != kept_back):
                return choice
            if kept_back is None and identity not in self._places:
                if self._free or any(not self._pins[other] for other in self._places):
                    return choice
                kept_back = next(iter(self._places))
        return None

    def seat(self, choice: Choice) -> None:
        """One that `first` has named begins."""
        identity = choice.request.adapter
        if identity is None:
            return
        slot = self._places.pop(identity, None)
        if slot is None:
            if not self._free:
                self._vacate(next(other for other in self._places if not self._pins[other]))
            slot = self._free.pop()
            self._installs[slot] = identity
        assert choice.hold is not None
        self._places[identity] = choice.hold.slot = slot
        self._pins[identity] += 1

    def leave(self, choice: Choice) -> None:
        """It runs no more."""
        if choice.request.adapter is not None:
            self._pins[choice.request.adapter] -= 1

    def installs(self) -> list[tuple[int, str]]:
        """(slot, adapter): what the next step needs to be put before it."""
        return list(self._installs.items()) if self._installs else []

    def installed(self) -> None:
        """It has been."""
        self._installs.clear()

    def states(self) -> dict[str, int]:
        """How many slots are free, idle (of an adapter that nobody runs with) and used. For any thread."""
        places = list(self._places)
        used = sum([self._pins[identity] > 0 for identity in places])
        return {"free": self.slots - len(places), "idle": len(places) - used, "used": used}

    def check_ledger(self, running: Sequence[Choice], requests: Sequence[Request]) -> None:
        """Raise AssertionError where a slot is held twice or by nobody, or somebody is counted who is not there."""
        held = [*self._places.values(), *self._free]
        assert sorted(held) == list(range(self.slots)), f"slots {held} of {self.slots}"
        assert +self._pins == Counter(c.request.adapter for c in running if c.request.adapter is not None), "pins are wrong"
        assert +self._users == Counter(r.adapter for r in requests if r.adapter is not None), "users are wrong"
        slots = [self._places.get(choice.request.adapter or "", -1) for choice in running]
        assert slots == [-1 if c.hold is None else c.hold.slot for c in running], "a choice runs elsewhere"
        assert self.kept == {*self.names.values(), *(+self._users)}, "the host keeps what nobody needs, or lacks what somebody does"
        assert self._places.keys() <= self.kept, "a slot holds what the host has dropped"
        assert all(self._places.get(identity) == slot for slot, identity in self._installs.items()), "what left is still to be put"

    def _vacate(self, identity: str) -> None:
        slot = self._places.pop(identity)
        self._installs.pop(slot, None)
        self._free.append(slot)

    def _sweep(self, identity: str | None) -> None:
        """Drop what no name means and nobody uses."""
        if identity not in self.kept or self._users[identity] > 0 or identity in self.names.values():
            return
        if identity in self._places:
            self._vacate(identity)
        self.kept -= {identity}
        self._drop(identity)
