"""What a run was like, as a picture: matplotlib is there where somebody wants it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rayneuron.errors import ConfigError
from rayneuron.sim.report import FleetReport

_SHARES = [i / 200 for i in range(1, 200)]


def check() -> None:
    """Raises ConfigError where nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'rayneuron[plots]', or leave --plot out")


def draw(report: FleetReport, path: Path) -> None:
    """Which share of the requests took how long, and the goals, as PNG."""
    check()
    from matplotlib.figure import Figure  # not pyplot: that looks for a screen
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{report.arrived} requests, {report.finished} answered, engines busy {report.busy:.0%}")
    shown = (("first token", report.ttft, report.slo_ttft_s), ("each token after it", report.tpot, report.slo_tpot_s))
    for axes, (name, times, goal_s) in zip(figure.subplots(1, 2), shown, strict=True):
        axes.plot([1e3 * times.at(share) for share in _SHARES], _SHARES)
        if goal_s is not None:
            axes.axvline(1e3 * goal_s, linestyle="--", color="gray", label="goal")
            axes.legend()
        axes.set(xlabel=f"{name}, ms", ylabel="share of requests", xscale="log", ylim=(0, 1))
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
