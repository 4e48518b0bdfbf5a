"""What a run was like: percentiles, refusals, reuse, and whether everything balances."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayneuron.sim.workload import Arrival, LeftOut

_STEP = math.log(1.01)  # bins are 1 % wide
_LEAST = 1e-6
_TOGETHER = 1024  # numbers are sorted into the bins so many at a time


class Distribution:
    """Numbers as counts in bins, however many there are."""

    __slots__ = ("_bins", "_count", "_most", "_new", "_total")

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._new: list[float] = []  # not in the bins yet
        self._count = 0
        self._total = self._most = 0.0

    def add(self, value: float) -> None:
        """One number, not negative."""
        self._new.append(value)
        if len(self._new) == _TOGETHER:
            self._sort()

    def _sort(self) -> None:
        new, self._new = self._new, []
        if new:
            self._bins.update((np.log(np.maximum(new, _LEAST)) / _STEP).astype(int).tolist())
            self._count += len(new)
            self._total = sum(new, self._total)
            self._most = max(self._most, *new)

    @property
    def count(self) -> int:
        """How many."""
        return self._count + len(self._new)

    @property
    def total(self) -> float:
        """Of all."""
        self._sort()
        return self._total

    @property
    def most(self) -> float:
        """The largest of all, 0 of none."""
        self._sort()
        return self._most

    @property
    def mean(self) -> float:
        """Of all, 0 of none."""
        return self.total / self.count if self.count else 0.0

    def at(self, share: float) -> float:
        """The number that such a share of all does not exceed, within 1 %."""
        self._sort()
        left = share * self.count
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                return min(math.exp((number + (1 if number >= 0 else 0)) * _STEP), self.most)
        return 0.0

    def summary(self) -> dict[str, float]:
        """For people and machines."""
        return {"mean": self.mean, "p50": self.at(0.5), "p90": self.at(0.9), "p95": self.at(0.95), "p99": self.at(0.99), "max": self.most}


@dataclass(slots=True)
class AccountReport:
    """One account's part."""

    ttft: Distribution = field(default_factory=Distribution)
    work_ms: float = 0.0
    finished: int = 0


@dataclass(slots=True)
class FleetReport:
    """Times in seconds. `cached_tokens` of `prompt_tokens` that nobody had to compute; `off`: of predicted first tokens, by actual."""

    left_out: LeftOut = field(default_factory=LeftOut)  # of the trace, before anybody saw them
    arrived: int = 0
    finished: int = 0
    failed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    replays: int = 0
    wrong: int = 0  # answers that were not what the engine had said, to the token
    ttft: Distribution = field(default_factory=Distribution)
    tpot: Distribution = field(default_factory=Distribution)
    whole: Distribution = field(default_factory=Distribution)
    waited: Distribution = field(default_factory=Distribution)
    pause: Distribution = field(default_factory=Distribution)
    off: Distribution = field(default_factory=Distribution)
    start_off: Distribution = field(default_factory=Distribution)  # predicted by actual start, of those who waited for a second or more
    crowd: Distribution = field(default_factory=Distribution)  # sequences of the busiest engine by those of the mean, every second
    accounts: dict[str, AccountReport] = field(default_factory=dict)
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    good: int = 0  # answers that met both goals, and their tokens
    good_tokens: int = 0
    seconds: float = 0.0
    pooled: int = 0  # prompts that a prefill pool has computed
    engines: float = 0.0  # there were, on average
    prefill_engines: float = 0.0  # of the pool
    busy: float = 0.0  # share of the time that engines had a step under way
    busiest: float = 0.0  # of the one that was busy longest, by the mean of all that lived to the end
    usd_per_hour: float | None = None  # of all nodes
    ended_s: float = 0.0  # when the last answer was whole
    shares_lost: bool = False  # prompts begin alike, and no engine keeps prefixes
    each: Callable[[Arrival, int, float, float, float], None] | None = None  # is told of every answer: tokens, ttft, tpot and whole, s

    def account(self, name: str) -> AccountReport:
        """One account's part."""
        found = self.accounts.get(name)
        if found is None:
            found = self.accounts[name] = AccountReport()
        return found

    def answered(self, arrival: Arrival, tokens: int, wrong: bool, first_s: float, now_s: float, work_ms: float) -> None:
        """A request has its whole answer, or a wrong one. `work_ms`: what it takes of a device."""
        self.finished += 1
        self.wrong += wrong
        self.prompt_tokens += arrival.prompt
        self.output_tokens += tokens
        self.whole.add(now_s - arrival.at_s)
        tpot_s = (now_s - first_s) / (tokens - 1) if tokens > 1 else 0.0
        if tokens > 1:
            self.tpot.add(tpot_s)
        self.ended_s = now_s
        if self.each is not None:
            self.each(arrival, tokens, first_s - arrival.at_s, tpot_s, now_s - arrival.at_s)
        if first_s - arrival.at_s <= (self.slo_ttft_s or math.inf) and tpot_s <= (self.slo_tpot_s or math.inf):
            self.good += 1
            self.good_tokens += tokens
        mine = self.account(arrival.account)
        mine.finished += 1
        mine.work_ms += work_ms

    @property
    def goodput(self) -> float:
        """Output tokens a second of answers that met the goals."""
        return self.good_tokens / self.ended_s if self.ended_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """From the beginning to the end of the last answer."""
        return self.output_tokens / self.ended_s if self.ended_s else 0.0

    @property
    def usd_per_million(self) -> float | None:
        """US dollars for a million output tokens, at the speed of this run."""
        if self.usd_per_hour is None or not self.output_tokens:
            return None
        return self.usd_per_hour * self.ended_s / 3600 / self.output_tokens * 1e6

    def json(self) -> dict[str, Any]:
        """All of it."""
        out = self.left_out
        spread = ("ttft", "tpot", "whole", "waited", "pause", "off", "crowd")
        plain = ("arrived", "finished", "failed", "prompt_tokens", "cached_tokens", "output_tokens", "replays", "wrong", "seconds")
        fleet = ("ended_s", "pooled", "engines", "prefill_engines", "busy", "busiest", "usd_per_hour", "usd_per_million")
        return {
            **{name: getattr(self, name) for name in (*plain, *fleet)},
            "refused": dict(self.refused),
            "left_out": {"requests": out.requests, "longest": out.longest, "max_model_len": out.most, "cut": out.cut},
            "slo": {"ttft_s": self.slo_ttft_s, "tpot_s": self.slo_tpot_s, "met": self.good / max(1, self.arrived), "goodput": self.goodput},
            "output_tokens_per_s": self.output_tokens_per_s,
            **{name: getattr(self, name).summary() for name in spread},
            "accounts": {
                name: {"finished": a.finished, "work_ms": a.work_ms, "ttft": a.ttft.summary()} for name, a in sorted(self.accounts.items())
            },
        }

    def text(self) -> str:
        """For people."""
        cached, speed = self.cached_tokens / max(1, self.prompt_tokens), self.output_tokens_per_s
        lines = [
            f"{self.arrived} requests in {self.ended_s:.1f} s: {self.finished} answered, {sum(self.refused.values())} refused, "
            f"{self.failed} failed, {self.replays} replayed",
            f"{self.prompt_tokens} prompt tokens ({cached:.1%} cached), {self.output_tokens} output tokens, {speed:.0f} a second; "
            f"{self.engines:.1f} engines, busy {self.busy:.1%}, the busiest {self.busiest:.2f} times as long as their mean",
        ]
        if (out := self.left_out).requests:
            lines.append(
                f"{out.requests} more were left out: prompt and answer have more tokens than max_model_len {out.most}, up to {out.longest}"
            )
        if out.cut:
            lines.append(f"{out.cut} of them were made up longer, and cut to max_model_len {out.most}")
        if self.shares_lost:
            lines.append("prompts begin alike, and no engine keeps prefixes: see --enable-prefix-caching true")
        if self.pooled:
            lines.append(f"{self.pooled} prompts were computed by the prefill pool, which had {self.prefill_engines:.1f} engines")
        shown = (("first token", self.ttft), ("each after it", self.tpot), ("answer", self.whole), ("at the gateway", self.waited))
        for name, what in shown:
            s = what.summary()
            lines.append(f"{name + ', ms:':23}" + "  ".join(f"{part} {1e3 * s[part]:.1f}" for part in s))
        if self.slo_ttft_s is not None or self.slo_tpot_s is not None:
            lines.append(f"goals met by {self.good / max(1, self.arrived):.1%} of all requests, {self.goodput:.0f} tokens a second of them")
        if self.usd_per_million is not None:
            lines.append(f"US$ {self.usd_per_hour:.2f} an hour, {self.usd_per_million:.2f} a million output tokens")
        return "\n".join(lines)
