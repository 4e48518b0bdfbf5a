"""Which requests are under way, and where: every way is in here once, from when it is taken in until it is forgotten."""

from __future__ import annotations

from collections import Counter

from rayneuron.gateway.ways import Way


class Books:
    """Ways by key, by request, and those at replicas by order."""

    def __init__(self) -> None:
        self.ways: dict[int, Way] = {}
        self.asked: dict[str, dict[int, Way]] = {}
        self.placed: dict[tuple[int, int], Way] = {}  # by worker and number of the order
        self.orders: Counter[int] = Counter()  # of those, by worker

    def take_in(self, way: Way, now_s: float) -> None:
        """A way begins."""
        self.ways[way.key] = way
        self.asked.setdefault(way.request.id, {})[way.key] = way
        way.since_s = now_s

    def place(self, way: Way, worker: int, number: int) -> None:
        """It goes to a replica."""
        way.place(worker, number)
        self.placed[worker, number] = way
        self.orders[worker] += 1

    def unplace(self, way: Way) -> None:
        """It is at no replica."""
        self._take_off(way)
        way.worker = None

    def forget(self, way: Way) -> None:
        """It is over; harmless where it was before."""
        self._take_off(way)
        self.ways.pop(way.key, None)
        mine = self.asked.get(way.request.id, {})
        mine.pop(way.key, None)
        if not mine:
            self.asked.pop(way.request.id, None)

    def _take_off(self, way: Way) -> None:
        if way.worker is not None and self.placed.pop((way.worker, way.number), None) is not None:
            self.orders[way.worker] -= 1

    def of(self, request_id: str) -> list[Way]:
        """Those of a request."""
        return list(self.asked.get(request_id, {}).values())

    def on(self, worker: int) -> list[Way]:
        """Those at a replica."""
        return [way for (number, _), way in self.placed.items() if number == worker]
