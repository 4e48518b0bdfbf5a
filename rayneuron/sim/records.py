"""What each request of a run was like and took, a line each: for percentiles of one's own, and to hold beside what a real fleet says."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayneuron.sim.report import FleetReport
from rayneuron.sim.workload import Arrival

COLUMNS = ("number", "at_s", "account", "session", "prompt_tokens", "output_tokens", "ttft_ms", "tpot_ms", "e2e_ms")


@contextmanager
def kept(report: FleetReport, path: str | None) -> Iterator[None]:
    """While a run goes on, write those that are answered there, in the order of their ends; None: nowhere."""
    if path is None:
        yield
        return
    with Path(path).open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(COLUMNS)

        def write(arrival: Arrival, tokens: int, ttft_s: float, tpot_s: float, whole_s: float) -> None:
            ms = [f"{1e3 * seconds:.6f}" for seconds in (ttft_s, tpot_s, whole_s)]
            lines.writerow((arrival.number, arrival.at_s, arrival.account, arrival.session, arrival.prompt, tokens, *ms))

        report.each = write
        yield
