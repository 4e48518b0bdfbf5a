"""Prompt lookup: what followed the last ids where they occurred before (Saxena 2023), in the text itself or in one that was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

NEWEST, FIRST = 8192, 2048  # ids of a long text that are looked at: the last ones and the first
CANDIDATES = 8  # occurrences looked at, the latest first
LONGEST = 12  # matches that are longer are one kind


class Index:
    """Where each n-gram of `least` ids has occurred in ids that only grow; `most`: how far back a match is followed."""

    __slots__ = ("_before", "_known", "_latest", "least", "most")

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._latest: dict[tuple[int, ...], int] = {}  # the place behind the latest one
        self._before: dict[int, int] = {}  # the one before that
        self._known = least  # places looked at

    def learn(self, ids: Sequence[int], end: int) -> None:
        """Look at the places before `end`, each with the n-gram that ends there."""
        if end - self._known > NEWEST + FIRST:
            self._add(ids, self._known, self._known + FIRST)
            self._known = end - NEWEST
        if end > self._known:
            self._add(ids, self._known, end)
            self._known = end

    def _add(self, ids: Sequence[int], start: int, end: int) -> None:
        latest, first = self._latest, start - self.least
        for place, key in enumerate(zip(*(ids[first + i : end - self.least + i] for i in range(self.least)), strict=True), start):
            if key in latest:
                self._before[place] = latest[key]
            latest[key] = place

    def find(self, ids: Sequence[int], tail: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(place, length) of matches of the end of `tail` in `ids`, the latest first: the ids before `place` are the tail's last ones."""
        if len(tail) < self.least:
            return
        place = self._latest.get(tuple(tail[len(tail) - self.least :]))
        for _ in range(CANDIDATES):
            if place is None:
                return
            length, longest = self.least, min(self.most, place, len(tail))
            while length < longest and ids[place - length - 1] == tail[len(tail) - length - 1]:
                length += 1
            yield place, length
            place = self._before.get(place)


class Echo:
    """Proposes of a sequence's own ids, prompt and output, what followed the longest match, of equals the latest; and goes on there as long
    as the output does, whether or not anybody tries it."""

    __slots__ = ("_at", "_index", "_length", "_seen")

    def __init__(self, least: int, most: int) -> None:
        self._index = Index(least, most)
        self._at: int | None = None  # what it proposes begins there
        self._length = 0  # so many ids before that are the text's last ones
        self._seen = 0  # ids of the text it was asked about

    def heard(self, ids: list[int]) -> list[tuple[int, bool]]:
        """What has become of what it would have proposed last: of each id, up to one that did not come, how many before it agreed, and
        whether it came."""
        at, told = self._at, list[tuple[int, bool]]()
        if at is None:
            return told
        for token in ids[self._seen :]:
            told.append((min(self._length, LONGEST), came := ids[at] == token))
            if not came:
                self._at = None
                break
            at, self._at, self._length = at + 1, at + 1, self._length + 1
        self._seen = len(ids)
        return told

    def looks(self, ids: list[int]) -> int:
        """How many of the last ids are known to stand before what it proposes, once it has heard of them: the more, the likelier that
        comes true. 0: it has nothing to propose."""
        if self._at is None:
            self._find(ids)
        return 0 if self._at is None else min(self._length, LONGEST)

    def propose(self, ids: list[int], count: int) -> tuple[int, ...]:
        """`count` ids, where it has some to propose."""
        assert self._at is not None
        found = ids[self._at : self._at + count]
        while len(found) < count:  # a match that reaches the end is a text that repeats itself
            found += found[: count - len(found)]
        return tuple(found)

    def _find(self, ids: list[int]) -> None:
        index = self._index
        index.learn(ids, len(ids))
        self._seen, self._length = len(ids), 0
        for place, length in index.find(ids, ids[-index.most :]):
            if length > self._length:
                self._at, self._length = place, length
                if length == index.most:
                    return


class Prediction:
    """Proposes what a client says the output will be: from a cursor, which looks for its place again where the output left the text."""

    __slots__ = ("_at", "_ids", "_index", "_seen")

    def __init__(self, ids: Sequence[int], least: int, most: int) -> None:
        self._ids = ids
        self._index = Index(least, most)
        self._index.learn(ids, len(ids))
        self._at: int | None = 0
        self._seen = 0  # output ids followed

    def propose(self, text: Sequence[int], prompt: int, count: int) -> tuple[int, ...]:
        """Up to `count` ids that may follow `text`, the first `prompt` of which are not output."""
        ids, at = self._ids, self._at
        for token in text[prompt + self._seen :]:
            at = at + 1 if at is not None and at < len(ids) and ids[at] == token else None
        self._seen = len(text) - prompt
        if at is None:
            tail = text[max(prompt, len(text) - self._index.most) :]
            at = max(self._index.find(ids, tail), key=lambda match: match[1], default=(None, 0))[0]
        self._at = at
        return () if at is None else tuple(ids[at : at + count])
