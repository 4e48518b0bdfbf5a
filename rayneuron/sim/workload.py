"""Requests and when they come, made up: Poisson or Gamma arrivals, shared prefixes, sessions, accounts. `traces` reads those of files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from msgspec import Struct

_SPREAD = 0x9E3779B97F5  # odd: numbers in a row are far from each other
OWN = 1 << 40  # numbers of what a request shares with nobody begin here


class Arrival(Struct, frozen=True):
    """One request: `prompt` tokens, and the `output` tokens it will be answered with, of `most` it asks for.

    `parts`: (number, tokens) of what prompt and answer are made of, in order; equal numbers are equal tokens. `own`: so many of the last
    are no other request's.
    """

    number: int
    at_s: float
    prompt: int
    output: int
    most: int | None = None
    account: str = ""
    session: str = ""
    parts: tuple[tuple[int, int], ...] = ()
    own: int = 0

    def hashes(self, block: int, most: int = 1 << 30) -> tuple[bytes, ...]:
        """Of all full blocks of prompt and answer, but no more than the first `most`. Parts that others have too are whole blocks."""
        made: list[bytes] = []
        most = min(most, (self.prompt + self.output) // block)
        for number, tokens in self.parts:
            behind = (number * _SPREAD & (1 << 44) - 1).to_bytes(6, "little") + number.to_bytes(8, "little")
            made += [at + behind for at in _places(min(tokens // block, most - len(made)))]
        return tuple(made)


class LeftOut(Struct):
    """Requests that no engine of the fleet takes: prompt and answer have more than `most` tokens together, at most `longest`. `cut`: those
    made up that were shortened to `most`."""

    requests: int = 0
    longest: int = 0
    most: int = 0
    cut: int = 0


class Fitting:
    """Those of some requests that fit `length` tokens, the first `most` of them (None: all); `left_out`: those that did not, so far;
    `shared`: whether one so far may have had a beginning that others have too. `cut`: longer ones were shortened to just that."""

    def __init__(self, found: Iterator[Arrival], length: int, most: int | None = None, cut: bool = False) -> None:
        self._found, self._most, self._cut = found, most, cut
        self.left_out, self.shared = LeftOut(most=length), False

    def __iter__(self) -> Iterator[Arrival]:
        left, out = self._most, self.left_out
        for arrival in self._found if left != 0 else ():
            tokens = arrival.prompt + arrival.output
            if tokens > out.most:
                out.requests, out.longest = out.requests + 1, max(out.longest, tokens)
                continue
            self.shared = self.shared or arrival.own < tokens
            out.cut += self._cut and tokens == out.most
            yield arrival
            if left is not None and not (left := left - 1):
                return


@dataclass(frozen=True, slots=True)
class Traffic:
    """Made-up requests of one account: `rate` a second, of about so many tokens (exponential, at least 1); `burstiness` as `gap_s` has it.

    `prefixes`: of how many prompts each begins with one, the first ones the likeliest (Zipf), of `shared` tokens. `turns`: of a session,
    each behind all before it, `think_s` after its answer might have come.
    """

    rate: float
    prompt: int
    output: int
    account: str = ""
    prefixes: int = 0
    shared: int = 0
    turns: int = 1
    think_s: float = 5.0
    most: int | None = None
    burstiness: float = 1.0
    weights: list[float] = field(init=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        self.weights.extend(1 / (i + 1) ** 1.1 for i in range(self.prefixes))


def made_up(streams: list[Traffic], seconds: float, random: Random, block: int = 64, longest: int = 1 << 30) -> Iterator[Arrival]:
    """The requests of all streams, in order of time."""
    number = 0
    due: list[tuple[float, int]] = [(gap_s(s.rate, s.burstiness, random), i) for i, s in enumerate(streams) if s.rate > 0]
    later: list[tuple[float, int, int, int, int]] = []  # of sessions: when, stream, number of the session, turn, tokens so far
    while due or later:
        if later and (not due or min(later)[0] <= min(due)[0]):
            turn = min(later)
            later.remove(turn)
            at_s, which, own, done, so_far = turn
        else:
            at_s, which = first = min(due)
            due.remove(first)
            due.append((at_s + gap_s(streams[which].rate, streams[which].burstiness, random), which))
            own, done, so_far = OWN + number, 0, 0
            if at_s >= seconds:
                due.remove(due[-1])
                continue
        stream = streams[which]
        fresh, output = _about(stream.prompt, random), _about(stream.output, random)
        parts: list[tuple[int, int]] = []
        if stream.prefixes:
            chosen = Random(own).choices(range(stream.prefixes), stream.weights)[0]
            parts.append(((which + 1) * 100_000 + chosen, stream.shared // block * block))
        head = sum(tokens for _, tokens in parts)
        fresh += stream.shared - head if stream.prefixes and not done else 0  # no whole block, and so nobody else's
        prompt = min(head + so_far + fresh, longest - 1)
        output = min(output, longest - prompt)
        parts.append((own, prompt + output - head))
        session = f"s{own}" if stream.turns > 1 else ""
        own_tokens = prompt + output - head if stream.turns == 1 else 0
        yield Arrival(number, at_s, prompt, output, stream.most, stream.account, session, tuple(parts), own_tokens)
        number += 1
        if done + 1 < stream.turns and prompt + output < longest // 2:
            later.append((at_s + random.expovariate(1 / stream.think_s), which, own, done + 1, prompt + output - head))


def gap_s(rate: float, burstiness: float, random: Random) -> float:
    """Seconds between two of `rate` a second: Gamma of shape `burstiness`, so that 1 is Poisson, less comes in bursts, more evenly."""
    return random.expovariate(rate) if burstiness == 1 else random.gammavariate(burstiness, 1 / (burstiness * rate))


@lru_cache(maxsize=4096)
def _places(count: int) -> list[bytes]:
    return [at.to_bytes(2, "little") for at in range(count)]


def _about(mean: int, random: Random) -> int:
    return max(1, round(random.expovariate(1 / mean)))
