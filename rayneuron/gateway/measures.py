"""What a gateway measures of itself, as `/metrics` says it beside its replicas' families."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family

from rayneuron import metrics
from rayneuron.gateway.remote import GATEWAY, RemoteEngine
from rayneuron.serve.telemetry import Histogram, Series, Telemetry, merged


class Measured:
    """The families of one model. `telemetry`: what its calls have measured here; `engines`: where they went."""

    def __init__(self, name: str, label: str, telemetry: Telemetry, engines: list[RemoteEngine]) -> None:
        self._base = (name, label)
        self._telemetry, self._engines = telemetry, engines

    def collect(self) -> Iterator[Family]:
        """Every family, for prometheus_client."""
        series = {metric: Series(metric) for metric in (GATEWAY.requests, GATEWAY.replicas, GATEWAY.refusals, GATEWAY.replays)}
        series |= {metric: Series(metric) for metric in (GATEWAY.replayed, GATEWAY.misdirected, GATEWAY.frames)}
        for engine in self._engines:
            waiting, placed = engine.under_way()
            series[GATEWAY.requests].add(waiting, "waiting")
            series[GATEWAY.requests].add(placed, "placed")
            series[GATEWAY.replicas].add(len(engine.fleet.able))
            series[GATEWAY.replayed].add(engine.repair.tokens)
            series[GATEWAY.misdirected].add(engine.misdirected)
            series[GATEWAY.frames].add(engine.fleet.heard_frames())
            for (cause, outcome), count in engine.repair.counts.items():
                series[GATEWAY.replays].add(count, cause, outcome)
        for labels, refused in self._telemetry.series[metrics.REJECTIONS].values.items():
            series[GATEWAY.refusals].set(refused, *labels)
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


def text(measured: list[Measured]) -> bytes:
    """The families of all models."""
    texts = []
    for each in measured:
        registry = CollectorRegistry()
        registry.register(each)
        texts.append(generate_latest(registry))
    return merged(texts)
