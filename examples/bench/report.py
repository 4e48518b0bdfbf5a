"""Percentiles, Markdown tables and the JSON file of one benchmark run (standard library only)."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(tempfile.gettempdir()) / "rayneuron-bench"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, linear between neighbours; nan where there are none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = (len(ordered) - 1) * share
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """p50, p90, p99 and the maximum, each times `scale`."""
    out = {name: percentile(values, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))}
    return {name: round(value * scale, 3) for name, value in out.items()}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of each round: a slow minute of the machine hits both sides of a round alike."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats with as many digits as help."""
    lines = [[str(x) for x in head], *([_cell(x) for x in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["| " + " | ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def bar(name: str, value: float, limit: float, at_least: bool = True) -> tuple[str, float, str, str]:
    """One row of a table of bars: name, value, the limit, met or missed."""
    met = value >= limit if at_least else value <= limit
    return name, value, f"{'>=' if at_least else '<='} {limit:g}", "met" if met else "MISSED"


def show_facts(facts: Mapping[str, object]) -> str:
    """The machine in one paragraph."""
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def tell(name: str, facts: Mapping[str, Any], about: str, text: str, figures: Mapping[str, Any], path: Path | None) -> None:
    """Print on what machine and of what it is, then the text; `save` the figures."""
    print(f"{show_facts(facts)}; {about}\n\n{text}")
    print(f"\n{save(name, {'machine': facts, **figures}, path)}", file=sys.stderr)


def save(name: str, document: Mapping[str, Any], path: Path | None) -> Path:
    """Write the document with a time stamp to `path`, or to FOLDER/NAME.json; returns where it went."""
    target = path or FOLDER / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **document}, indent=1) + "\n")
    return target
