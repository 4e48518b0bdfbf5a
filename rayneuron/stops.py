"""Stop strings found in a growing text, withholding no more than what may still become one."""

from __future__ import annotations


class Stops:
    """Scans text that arrives in pieces for the stop string that is complete first (the longest, if several end at the same character).

    The outcome depends on the text alone, not on how it was cut into pieces. With `include` the match stays in the text and nothing is
    withheld.
    """

    __slots__ = ("_heads", "_include", "_stops", "_tail")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        # Longest first: at an equal end the first hit then wins.
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._heads = tuple({stop[:size] for stop in self._stops for size in range(1, len(stop))})
        self._include = include
        self._tail = ""  # the longest end of the text so far that begins a stop string

    def push(self, piece: str, armed: bool = True) -> tuple[str, str | None]:
        """Text that may go out now, and the stop string this piece completed. `armed` False: this piece completes none (min_tokens)."""
        text = self._tail + piece
        known = len(self._tail)
        if armed:
            found = self._first(text, known)
            if found is not None:
                stop, end = found
                start = known if self._include else 0
                self._tail = ""
                return text[start : end if self._include else end - len(stop)], stop
        keep = self._begins(text)
        self._tail = text[len(text) - keep :]
        if self._include:
            return piece, None
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was withheld, at the end of a text without a match."""
        tail, self._tail = self._tail, ""
        return "" if self._include else tail

    def _first(self, text: str, known: int) -> tuple[str, int] | None:
        """The stop string that ends first after the `known` characters scanned before, with its end."""
        best: tuple[str, int] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, known + 1 - len(stop)))
            if at >= 0 and (best is None or at + len(stop) < best[1]):
                best = stop, at + len(stop)
        return best

    def _begins(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        if not text.endswith(self._heads):  # one call in C answers for nearly every token
            return 0
        return max(len(head) for head in self._heads if text.endswith(head))
