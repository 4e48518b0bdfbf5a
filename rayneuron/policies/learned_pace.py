"""How a replica's first tokens come beside what the times of its steps say: learned from each that comes, forgotten where none does.

Two numbers, told apart by a Kalman filter over the logarithm of what was predicted: its own work takes a multiple of what was measured
(in a busier hour, or a quieter one), and every order is late by as many milliseconds, short or long (the way there and back). What is odd
counts only so far, and both numbers have bounds, so that nothing anybody observes makes a prediction wrong by more than these.
"""

from __future__ import annotations

from math import exp, log, sqrt

MOST_OFF = 5.0  # the multiple, or one part of it
MOST_LATE_MS = 100.0
_MOST_LOG = log(MOST_OFF)
_OFF, _LATE_MS = 1.0, 10.0  # how far from none they are expected before the first order, of the multiple its logarithm
_NOISE = 0.25  # of the time to a first token, what nobody can know
_DOUBT = 0.0002  # of what is known, how much each first token leaves less sure
_ODD = 3.0  # deviations, the most that an observation counts
_FORGET_S = 600.0  # in which half of what is known is forgotten where nothing comes


class LearnedPace:
    """`factor` of a replica's own work, `late_ms` of each order, as of `known_s`. Time is an argument."""

    __slots__ = ("_both", "_late", "_late_var", "_off", "_off_var", "factor", "known_s", "late_ms")

    def __init__(self, now_s: float) -> None:
        self.factor, self.late_ms = 1.0, 0.0
        self._off = self._late = self._both = 0.0  # the last is what the errors of both have in common
        self._off_var, self._late_var = _OFF**2, _LATE_MS**2
        self.known_s = now_s

    def later_ms(self, own_ms: float) -> float:
        """How much later, or sooner, than after so much work by the profile. It makes predictions true, and chooses no replica: one that
        was slow once, and is asked no more for that, would never be known to be fast."""
        return self.late_ms + (self.factor - 1) * own_ms

    def learn(self, queue_ms: float, own_ms: float, actual_ms: float, now_s: float) -> None:
        """A first token has come after `actual_ms`: behind others that were to take `queue_ms`, and a prompt that by the profile takes
        `own_ms`, above 0."""
        self._fade(now_s)
        self._doubt(_DOUBT)
        own = exp(self._off) * own_ms
        expected = queue_ms + own + self._late
        of_off, of_late = own / expected, 1.0 / expected  # what each of the two does to the logarithm of that
        with_off = self._off_var * of_off + self._both * of_late
        with_late = self._both * of_off + self._late_var * of_late
        var = of_off * with_off + of_late * with_late + _NOISE**2
        most = min(_ODD * sqrt(var), _MOST_LOG)
        wrong = _within(log(max(actual_ms, 1e-3) / expected), -most, most)
        self._off = _within(self._off + with_off / var * wrong, -_MOST_LOG, _MOST_LOG)
        self._late = _within(self._late + with_late / var * wrong, 0.0, MOST_LATE_MS)
        self._off_var -= with_off * with_off / var
        self._late_var -= with_late * with_late / var
        self._both -= with_off * with_late / var
        self._tell()

    def assume(self, factor: float) -> None:
        """Begin with another factor than none, as little sure of it."""
        self._off = log(factor)
        self._tell()

    def fade(self, now_s: float) -> None:
        """Time has passed."""
        self._fade(now_s)
        self._tell()

    def _fade(self, now_s: float) -> None:
        left = 0.5 ** ((now_s - self.known_s) / _FORGET_S)
        self.known_s = now_s
        self._off, self._late = left * self._off, left * self._late
        self._doubt(1 - left)

    def _doubt(self, share: float) -> None:
        self._off_var += share * (_OFF**2 - self._off_var)
        self._late_var += share * (_LATE_MS**2 - self._late_var)
        self._both -= share * self._both

    def _tell(self) -> None:
        self.factor, self.late_ms = exp(self._off), self._late


def _within(value: float, least: float, most: float) -> float:
    return least if value < least else most if value > most else value
