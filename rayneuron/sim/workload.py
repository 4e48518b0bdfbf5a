"""Requests and when they come: public traces, or made up of Poisson arrivals, shared prefixes, sessions and accounts."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from math import isfinite
from operator import itemgetter
from pathlib import Path
from random import Random

from msgspec import Struct

from rayneuron.errors import ConfigError

_MOONCAKE = 512  # tokens of a block of that trace
_SPREAD = 0x9E3779B97F5  # odd: numbers in a row are far from each other
_OWN = 1 << 40  # numbers of what a request shares with nobody begin here


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
    """Requests that no engine of the fleet takes: prompt and answer together have more than `most` tokens, at most `longest`."""

    requests: int = 0
    longest: int = 0
    most: int = 0


class Fitting:
    """Those of some requests that fit `length` tokens, the first `most` of them (None: all); `left_out`: those that did not, so far."""

    def __init__(self, found: Iterator[Arrival], length: int, most: int | None = None) -> None:
        self._found, self._most = found, most
        self.left_out = LeftOut(most=length)

    def __iter__(self) -> Iterator[Arrival]:
        left, out = self._most, self.left_out
        for arrival in self._found if left != 0 else ():
            tokens = arrival.prompt + arrival.output
            if tokens > out.most:
                out.requests, out.longest = out.requests + 1, max(out.longest, tokens)
                continue
            yield arrival
            if left is not None and not (left := left - 1):
                return


@dataclass(frozen=True, slots=True)
class Traffic:
    """Made-up requests of one account: `rate` a second, of about so many tokens (exponential, at least 1).

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
    weights: list[float] = field(init=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        self.weights.extend(1 / (i + 1) ** 1.1 for i in range(self.prefixes))


def made_up(streams: list[Traffic], seconds: float, random: Random, block: int = 64, longest: int = 1 << 30) -> Iterator[Arrival]:
    """The requests of all streams, in order of time."""
    number = 0
    due: list[tuple[float, int]] = [(random.expovariate(s.rate), i) for i, s in enumerate(streams) if s.rate > 0]
    later: list[tuple[float, int, int, int, int]] = []  # of sessions: when, stream, number of the session, turn, tokens so far
    while due or later:
        if later and (not due or min(later)[0] <= min(due)[0]):
            turn = min(later)
            later.remove(turn)
            at_s, which, own, done, so_far = turn
        else:
            at_s, which = first = min(due)
            due.remove(first)
            due.append((at_s + random.expovariate(streams[which].rate), which))
            own, done, so_far = _OWN + number, 0, 0
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
        prompt = min(head + so_far + fresh, longest - 1)
        output = min(output, longest - prompt)
        parts.append((own, prompt + output - head))
        session = f"s{own}" if stream.turns > 1 else ""
        own_tokens = prompt + output - head if stream.turns == 1 else 0
        yield Arrival(number, at_s, prompt, output, stream.most, stream.account, session, tuple(parts), own_tokens)
        number += 1
        if done + 1 < stream.turns and prompt + output < longest // 2:
            later.append((at_s + random.expovariate(1 / stream.think_s), which, own, done + 1, prompt + output - head))


@lru_cache(maxsize=4096)
def _places(count: int) -> list[bytes]:
    return [at.to_bytes(2, "little") for at in range(count)]


def _about(mean: int, random: Random) -> int:
    return max(1, round(random.expovariate(1 / mean)))


def read(path: Path, scale: float = 1.0, repeat: int = 1, rate: float = 1.0, seed: int = 0) -> Iterator[Arrival]:
    """A trace file: Azure's (.csv: TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's (.jsonl) or Vidur's (.csv: num_prefill_tokens,
    num_decode_tokens), which has no times: they come at random, `rate` a second. `scale`: so many times as fast as the trace has it;
    `repeat`: so many times over, one after another."""
    number, behind_s, random, kept = 0, 0.0, Random(seed), list[_Row]()
    for again in range(repeat):
        last_s = 0.0
        for row in kept if again else _lines(path):
            at_s, prompt, output, parts = row
            if not again and repeat > 1:
                kept.append(row)
            last_s = last_s + random.expovariate(rate) if at_s is None else at_s / scale
            own = prompt + output - sum([tokens for _, tokens in parts])
            yield Arrival(number, behind_s + last_s, prompt, output, parts=(*parts, (_OWN + number, own)), own=own)
            number += 1
        behind_s += last_s


_Row = tuple[float | None, int, int, tuple[tuple[int, int], ...]]  # seconds, prompt, output, parts


def _lines(path: Path) -> Iterator[_Row]:
    kind = {".csv": _table, ".jsonl": _mooncake}.get(path.suffix)
    if kind is None:
        raise ConfigError(f"{path}: a trace is a .csv as Azure's or Vidur's, or a .jsonl as Mooncake's")
    with path.open() as file:
        line, before_s = 1, 0.0
        try:
            requests = kind(file)
            line += path.suffix == ".csv"
            for found in requests:
                if found[1] < 1 or found[2] < 1:
                    raise ValueError("a request has a token at least, each way")
                if found[0] is not None and not isfinite(found[0]):
                    raise ValueError("its time is no number of seconds")
                if found[0] is not None and found[0] < before_s:
                    raise ValueError("it came before the one on the line above; sort the lines by time")
                before_s = found[0] or before_s
                yield found
                line += 1
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as wrong:
            raise ConfigError(f"{path}, line {line}: {_said(wrong)}") from wrong


def _said(wrong: Exception) -> str:
    if isinstance(wrong, IndexError):
        return "it has fewer columns than the first line"
    if isinstance(wrong, TypeError):
        return f"it is not as such a trace has its lines ({wrong})"
    return f"there is no {wrong.args[0]}" if isinstance(wrong, KeyError) else str(wrong)


def _table(file: Iterator[str]) -> Iterator[_Row]:
    rows = csv.reader(file)
    names = next(rows, [])
    timed = "num_prefill_tokens" not in names
    wanted = ("TIMESTAMP", "ContextTokens", "GeneratedTokens") if timed else ("num_prefill_tokens", "num_decode_tokens")
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"there is no column {missing[0]}")
    return _requests(rows, itemgetter(*map(names.index, wanted)), timed)


def _requests(rows: Iterator[list[str]], pick: Callable[[list[str]], tuple[str, ...]], timed: bool) -> Iterator[_Row]:
    first = None
    for row in rows:
        if not timed:
            prompt, output = pick(row)
            yield None, int(float(prompt)), int(float(output)), ()
            continue
        said, prompt, output = pick(row)
        when = datetime.fromisoformat(said[:26])
        first = first or when
        yield (when - first).total_seconds(), int(prompt), int(output), ()


def _mooncake(file: Iterator[str]) -> Iterator[_Row]:
    for line in file:
        row = json.loads(line)
        prompt = int(row["input_length"])
        whole = [int(number) for number in row["hash_ids"][: prompt // _MOONCAKE]]
        yield row["timestamp"] / 1e3, prompt, int(row["output_length"]), tuple((number, _MOONCAKE) for number in whole)
