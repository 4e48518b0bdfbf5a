"""Contiguous KV: one row a sequence, one scratch row, and a budget of tokens over all rows."""

from __future__ import annotations

import heapq

from rayneuron.engine.buckets import GRANULE


class Slots:
    """Owner of every KV row. A row belongs to at most one sequence; the lowest free row goes first, so that rows stay dense.

    Invariant (`check`): free rows + held rows = all rows, and the tokens held by rows never exceed the budget.
    """

    def __init__(self, rows: int, length: int, kv_tokens: int) -> None:
        self.rows = rows
        self.length = length
        self.budget = kv_tokens // GRANULE  # granules
        self._free = list(range(rows))
        self._held: dict[int, int] = {}  # row -> granules
        self._used = 0

    @property
    def scratch(self) -> int:
        """The row that idle rows of a batch point at."""
        return self.rows

    @property
    def free_count(self) -> int:
        """Rows nobody holds."""
        return len(self._free)

    @property
    def used_tokens(self) -> int:
        """Tokens of the budget that are held, rounded up to the granule."""
        return self._used * GRANULE

    @property
    def total_tokens(self) -> int:
        """The budget in tokens."""
        return self.budget * GRANULE

    def fits(self, tokens: int) -> bool:
        """Whether one sequence of `tokens` could ever run alone."""
        return tokens <= self.length and _granules(tokens) <= self.budget

    def reserve(self, tokens: int) -> int | None:
        """A free row with room for `tokens`, or None."""
        need = _granules(tokens)
        if not self._free or self._used + need > self.budget:
            return None
        row = heapq.heappop(self._free)
        self._held[row] = need
        self._used += need
        return row

    def extend(self, row: int, tokens: int) -> bool:
        """Make room for `tokens` in a held row; False if the budget is spent."""
        more = _granules(tokens) - self._held[row]
        if more <= 0:
            return True
        if self._used + more > self.budget:
            return False
        self._held[row] += more
        self._used += more
        return True

    def release(self, row: int) -> None:
        """Give a row back."""
        self._used -= self._held.pop(row)
        heapq.heappush(self._free, row)

    def check(self) -> None:
        """Raise AssertionError if the invariant is broken."""
        assert sorted([*self._free, *self._held]) == list(range(self.rows)), (self._free, self._held)
        assert self._used == sum(self._held.values()) <= self.budget, (self._used, self._held)


def _granules(tokens: int) -> int:
    return -(-tokens // GRANULE)
