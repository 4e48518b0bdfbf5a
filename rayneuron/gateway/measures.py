"""What a gateway measures of itself, as `/metrics` says it beside its replicas' families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family

from rayneuron import metrics
from rayneuron.gateway.remote import GATEWAY, RemoteEngine
from rayneuron.serve.telemetry import Histogram, Series, Telemetry, merged

HOST = metrics.HostMetrics()


class Measured:
    """The families of one model. `telemetry`: what its calls have measured here; `engines`: where they went."""

    def __init__(self, name: str, label: str, telemetry: Telemetry, engines: list[RemoteEngine]) -> None:
        self._base = (name, label)
        self._telemetry, self._engines = telemetry, engines

    def collect(self) -> Iterator[Family]:
        """Every family, for prometheus_client."""
        series = {metric: Series(metric) for metric in (GATEWAY.requests, GATEWAY.replicas, GATEWAY.refusals, GATEWAY.replays)}
        series |= {metric: Series(metric) for metric in (GATEWAY.replayed, GATEWAY.undone, GATEWAY.frames, GATEWAY.tool_calls)}
        for engine in self._engines:
            waiting, placed = engine.under_way()
            series[GATEWAY.requests].add(waiting, "waiting")
            series[GATEWAY.requests].add(placed, "placed")
            series[GATEWAY.replicas].add(len(engine.fleet.able))
            series[GATEWAY.replayed].add(engine.repair.tokens)
            series[GATEWAY.undone].add(engine.undone)
            series[GATEWAY.frames].add(engine.fleet.heard_frames())
            for (cause, outcome), count in engine.repair.counts.items():
                series[GATEWAY.replays].add(count, cause, outcome)
        for labels, refused in self._telemetry.series[metrics.REJECTIONS].values.items():
            series[GATEWAY.refusals].set(refused, *labels)
        series[GATEWAY.tool_calls].values.update(self._telemetry.series[metrics.TOOL_CALLS].values)
        for each in series.values():
            yield each.family(self._base)
        ttft = Histogram(GATEWAY.ttft)
        ttft.counts, ttft.sum = self._telemetry.histograms[metrics.TTFT].counts, self._telemetry.histograms[metrics.TTFT].sum
        errors = Histogram(GATEWAY.prediction_error)
        for engine in self._engines:
            errors.counts = [ours + theirs for ours, theirs in zip(errors.counts, engine.errors.counts, strict=True)]
            errors.sum += engine.errors.sum
        yield ttft.family(self._base)
        yield errors.family(self._base)


class HostMeasured:
    """The families of a host, from what its arbiter describes. `refused`: calls turned away here, by model and reason."""

    def __init__(self, told: Mapping[str, Any], label: str, refused: Mapping[tuple[str, str], int]) -> None:
        self._told, self._label, self._refused = told, label, refused

    def collect(self) -> Iterator[Family]:
        """Every family, for prometheus_client."""
        for name in self._told["models"]:
            yield from (series.family((name, "host")) for series in self._model(name))
            refusals = Series(HOST.refusals)
            for (model, reason), count in self._refused.items():
                if model == name:
                    refusals.set(count, reason)
            yield refusals.family((name, self._label))
        yield self._cores().family(("", "host"))

    def _model(self, name: str) -> Iterator[Series]:
        one = self._told["models"][name]
        states, seats, wakes, gone = Series(HOST.models), Series(HOST.seats), Series(HOST.wakes), Series(HOST.dismissals)
        states.set(1, one["state"])
        for seat in self._told["seats"]:
            if seat["model"] == name:
                seats.add(1, seat["state"])
        for count in self._told["counts"]:
            if count["model"] == name:
                of = wakes if (count["what"],) in HOST.wakes.known else gone
                of.set(count["count"], count["what"])
        yield from (states, seats, wakes, gone)
        awake = one["state"] == "ready"
        for metric, value in (
            (HOST.eta, None if awake else one["eta_s"]), (HOST.eta_error, one["eta_error"]), (HOST.held, one["held"]),
            (HOST.resident, one["resident"]),
        ):  # fmt: skip
            if value is not None:
                series = Series(metric)
                series.set(value)
                yield series

    def _cores(self) -> Series:
        series = Series(HOST.cores)
        for name, node in self._told["nodes"].items():
            seated = {core for seat in self._told["seats"] if seat["node"] == name for core in seat["cores"]}
            left, free = set(node["left"]), set(node["free"])
            for state, cores in (("free", free - seated), ("seat", seated), ("foreign", left - free - seated)):
                series.set(len(cores), name, state)
        return series


class Collector(Protocol):
    """What prometheus_client asks."""

    def collect(self) -> Iterator[Family]: ...


def text(measured: Sequence[Collector]) -> bytes:
    """The families of all of them, each once."""
    texts = []
    for each in measured:
        registry = CollectorRegistry()
        registry.register(each)
        texts.append(generate_latest(registry))
    return merged(texts)
