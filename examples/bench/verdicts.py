"""The bars of issue 6 for the engine alone: what each compares, the roofline, and whether it is met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import report

OURS, OURS_INT8 = "rayneuron", "rayneuron int8"
READ, PRODUCTS = "read_bytes_s", "bf16_ops_s"  # what roofline.py measures
Rates = Mapping[str, Mapping[str, Sequence[float]]]  # case -> engine -> the rate of every round


@dataclass(frozen=True, slots=True)
class Bar:
    """`engine` must reach `limit` times `other` in `case`: an engine, "best" (of the peers in bf16), or a rate of the machine."""

    case: str
    limit: float
    other: str
    engine: str = OURS


BARS = (
    Bar("decode 1", 0.85, READ),
    Bar("decode 1", 1.0, "llamacpp"),
    Bar("decode 8", 1.2, "best"),
    Bar("decode 16", 1.1, "best"),
    Bar("decode 1", 1.6, OURS, OURS_INT8),
    Bar("decode 1", 1.2, "llamacpp int8", OURS_INT8),
    *(bar for n in (512, 2048) for bar in (Bar(f"prefill {n}", 1.0, "best"), Bar(f"prefill {n}", 0.8, PRODUCTS))),
    *(Bar(f"prefill {n}", 1.3, OURS, OURS_INT8) for n in (512, 2048)),
)


@dataclass(frozen=True, slots=True)
class Model:
    """What a bf16 model costs: bytes a decode step reads, and operations of a prompt."""

    layer_weights: int
    head_weights: int
    width: int  # query heads x head size x layers

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Model:
        """From config.json."""
        from rayneuron import models
        from rayneuron.models.memory import parameters

        arch = models.architecture(dict(config))
        layers = parameters(arch, models.family(dict(config))).products
        return cls(layers, arch.vocab * (arch.embed or arch.hidden), arch.heads * arch.head_dim * arch.layers)

    @property
    def step_bytes(self) -> int:
        """Weights of all products in bf16; norms and KV, 2 % of it, do not count."""
        return 2 * (self.layer_weights + self.head_weights)

    def prompt_ops(self, tokens: int) -> int:
        """Multiplications and additions of the products, of causal attention, and of the head for the last token."""
        return 2 * tokens * self.layer_weights + 2 * tokens * (tokens + 1) * self.width + 2 * self.head_weights

    def ceiling(self, case: str, machine_rate: float) -> float:
        """Tokens a second at which `case` would use all of one rate of the machine."""
        kind, size = case.split()
        return machine_rate / self.step_bytes if kind == "decode" else machine_rate * int(size) / self.prompt_ops(int(size))


def best_peer(rates: Mapping[str, Sequence[float]]) -> str | None:
    """The fastest engine in bf16 that is not ours, by its median."""
    peers = [name for name in rates if not name.startswith(OURS) and " " not in name]
    return max(peers, key=lambda name: statistics.median(rates[name]), default=None)


def judge(rates: Rates, beside: Mapping[str, Sequence[float]], model: Model) -> list[tuple[object, ...]]:
    """A row for each bar this run can decide: what is compared, the ratio (median over rounds), the limit, met or MISSED.

    `beside`: of every case the rate of the machine that bounds it, measured around ours in every round.
    """
    rows = []
    for bar in BARS:
        found = rates.get(bar.case, {})
        other = best_peer(found) if bar.other == "best" else bar.other
        if bar.engine not in found:
            continue
        if other in (READ, PRODUCTS):
            against = [model.ceiling(bar.case, rate) for rate in beside[bar.case]]
            label = "what memory can feed" if other == READ else "the bf16 GEMM rate"
        elif other in found:
            against, label = list(found[other]), f"{'best peer: ' if bar.other == 'best' else ''}{other}"
        else:
            continue
        rows.append(report.bar(f"{bar.case}: {bar.engine} / {label}", report.median_ratio(found[bar.engine], against), bar.limit))
    return rows


def show_machine(machine_rates: Mapping[str, Sequence[float]]) -> str:
    """The roofline in one line."""
    read, bf16, int8 = (statistics.median(machine_rates[name]) / 1e9 for name in (READ, PRODUCTS, "int8_ops_s"))
    return f"Memory is read at {read:.1f} GB/s; products of 2048 x 2048 run at {bf16:.0f} GFLOP/s in bf16, {int8:.0f} Gop/s in int8"
