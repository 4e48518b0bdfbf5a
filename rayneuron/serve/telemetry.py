"""What one replica has measured: exact sums for `/metrics`, and the same pushed to `ray.util.metrics` now and then.

Updating is a few additions on the event loop, once a step or once a request; all formatting happens when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from rayneuron import metrics
from rayneuron.metrics import LABELS, Metric
from rayneuron.types import FinishReason, Profile, Request, Snapshot, Stamps

if TYPE_CHECKING:
    from rayneuron.engine.timing import StepInfo

RECENT_LIMIT = 10_000  # observations kept for the next push to Ray; the exact sums on /metrics never lose any


class Series:
    """The values of one counter or gauge, by its label values."""

    __slots__ = ("metric", "values")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.values: dict[tuple[str, ...], float] = dict.fromkeys(metric.known if metric.labels else ((),), 0.0)

    def add(self, amount: float = 1.0, *labels: str) -> None:
        """Count `amount` more."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def set(self, value: float, *labels: str) -> None:
        """Replace the value (gauges, and counters somebody else counts)."""
        self.values[labels] = value

    def family(self, base: tuple[str, str]) -> Family:
        """The Prometheus form."""
        kind = CounterMetricFamily if self.metric.kind == "counter" else GaugeMetricFamily
        family = kind(self.metric.name, self.metric.help, labels=(*LABELS, *self.metric.labels))
        for labels, value in self.values.items():
            family.add_metric((*base, *labels), value)
        return family


class Histogram:
    """Bucket counts and the exact sum of one histogram; `recent` are the observations Ray has not seen."""

    __slots__ = ("_last", "_place", "counts", "metric", "recent", "sum")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.counts = [0] * (len(metric.buckets) + 1)
        self.sum = 0.0
        self.recent: list[float] = []
        self._last, self._place = -1.0, 0  # all streams of a step have the same

    def observe(self, value: float) -> None:
        """Count one observation."""
        if value != self._last:
            self._last, self._place = value, bisect_left(self.metric.buckets, value)
        self.counts[self._place] += 1
        self.sum += value
        if not self.metric.per_token and len(self.recent) < RECENT_LIMIT:
            self.recent.append(value)

    def family(self, base: tuple[str, str]) -> Family:
        """The Prometheus form: cumulative buckets, count and exact sum."""
        family = HistogramMetricFamily(self.metric.name, self.metric.help, labels=LABELS)
        total, buckets = 0, []
        for bound, count in zip((*(str(float(b)) for b in self.metric.buckets), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(base, buckets, self.sum)
        return family


Values = Mapping[Metric, Mapping[tuple[str, ...], float]]  # of counters and gauges that somebody else keeps, by label values


class Load:
    """The state of the replica at the moment of a scrape: the engine's snapshot and the open calls; `chosen`: what its start decided;
    `told`: what its part in pools is."""

    __slots__ = ("calls", "chosen", "profile", "refused", "sequences", "snapshot", "told")

    def __init__(
        self, snapshot: Snapshot, calls: int, sequences: int, refused: str | None = None, chosen: Mapping[str, Any] | None = None,
        profile: Profile | None = None, told: Values | None = None,
    ) -> None:  # fmt: skip
        self.chosen = chosen or {}
        self.profile = profile  # what steps take
        self.told = told or {}
        self.snapshot = snapshot
        self.calls = calls
        self.sequences = sequences
        self.refused = refused  # why the last user_config was


class Telemetry:
    """All series of one replica. `load` is asked at scrape time; label values are the served model name and the replica's number."""

    def __init__(self, model_name: str, engine: str, load: Callable[[], Load]) -> None:
        self.base = (model_name, engine)
        self._load = load
        self.series = {m: Series(m) for m in metrics.METRICS if m.kind != "histogram"}
        self.histograms = {m: Histogram(m) for m in metrics.METRICS if m.kind == "histogram"}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._process = ProcessCollector(registry=None)
        self.prefix_cache, self.step_s = False, 0.0  # the latter of late
        # Looked up once: these are touched every step.
        self._tokens = self.series[metrics.GENERATION_TOKENS]
        self._step_time, self._iteration = self.histograms[metrics.STEP_TIME], self.histograms[metrics.ITERATION]
        self.inter_token = self.histograms[metrics.INTER_TOKEN]

    def step(self, tokens: int, prompt_tokens: int) -> None:
        """One engine step delivered `tokens` tokens; it completed prompts of `prompt_tokens`."""
        self._tokens.values[()] += tokens
        self._iteration.observe(tokens + prompt_tokens)

    def timed(self, info: StepInfo) -> None:
        """How long one step took, and its drafts. Called on the engine thread, which alone touches these series."""
        self._step_time.observe(took_s := info.plan_s + info.run_s + info.commit_s)
        self.step_s += 0.05 * (took_s - self.step_s)
        if info.paused:
            self.series[metrics.SPEC_PAUSED].values[info.paused,] += 1
        for tried, accepted in info.drafts:
            for metric, count in ((metrics.SPEC_DRAFTS, 1), (metrics.SPEC_DRAFT_TOKENS, tried), (metrics.SPEC_ACCEPTED, accepted)):
                self.series[metric].add(count)
            for place in range(accepted):
                self.series[metrics.SPEC_ACCEPTED_BY_PLACE].add(1, str(place))

    def prefilled(self, prompt_tokens: int, cached_tokens: int, ttft_s: float, remote: bool = False) -> None:
        """A request produced its first token, maybe in another pool."""
        self.series[metrics.PROMPT_TOKENS].add(prompt_tokens)
        self.series[metrics.PROMPT_TOKENS_CACHED].add(cached_tokens)
        source = "external_kv_transfer" if remote else "local_compute"
        self.series[metrics.PROMPT_TOKENS_BY_SOURCE].add(prompt_tokens - cached_tokens, source)
        self.series[metrics.PROMPT_TOKENS_BY_SOURCE].add(cached_tokens, "local_cache_hit")
        if self.prefix_cache:
            self.series[metrics.PREFIX_QUERIES].add(prompt_tokens)
            self.series[metrics.PREFIX_HITS].add(cached_tokens)
        self.histograms[metrics.REQUEST_COMPUTED].observe(prompt_tokens - cached_tokens)
        self.histograms[metrics.TTFT].observe(ttft_s)

    def asked(self, request: Request) -> None:
        """A request went to the engine."""
        self.histograms[metrics.REQUEST_PROMPT_TOKENS].observe(len(request.prompt_ids))
        self.histograms[metrics.REQUEST_N].observe(request.params.n)
        if request.params.max_tokens is not None:
            self.histograms[metrics.REQUEST_MAX_TOKENS].observe(request.params.max_tokens)

    def kv_cache(self, blocks: int, block_tokens: int, dtype: str, prefix_cache: bool) -> None:
        """What the KV cache is made of; contiguous rows are one block a row. `prefix_cache`: whether prompts are looked up in it."""
        self.prefix_cache = prefix_cache
        self.series[metrics.CACHE_CONFIG].set(1, str(block_tokens), str(blocks), str(self.prefix_cache), dtype)

    def finished(self, reason: FinishReason, tokens: int, stamps: Stamps | None, now_s: float) -> None:
        """One choice ended, with the engine's stamps where it reached them."""
        self.series[metrics.SUCCESS].add(1, reason)
        self.histograms[metrics.REQUEST_GENERATION_TOKENS].observe(tokens)
        if stamps is None or not stamps.arrived:
            return
        end_s = stamps.finished or now_s
        self.histograms[metrics.E2E].observe(end_s - stamps.arrived)
        if not stamps.scheduled:
            return
        self.histograms[metrics.QUEUE_TIME].observe(stamps.scheduled - stamps.arrived)
        self.histograms[metrics.INFERENCE_TIME].observe(end_s - stamps.scheduled)
        if not stamps.first_token:
            return
        if stamps.adopted:
            self.histograms[metrics.KV_TRANSFER_TIME].observe(max(0.0, stamps.adopted - stamps.first_token))
        self.histograms[metrics.PREFILL_TIME].observe(stamps.first_token - stamps.scheduled)
        self.histograms[metrics.DECODE_TIME].observe(end_s - stamps.first_token)
        if tokens > 1:
            self.histograms[metrics.TIME_PER_TOKEN].observe((end_s - stamps.first_token) / (tokens - 1))

    def complete(self, longest: int) -> None:
        """The last choice of a request ended; the longest has so many tokens."""
        self.histograms[metrics.REQUEST_LONGEST].observe(longest)

    def dropped(self, choices: int, failed: bool) -> None:
        """Choices of a call that was closed before they ended: its client left, or it failed."""
        self.series[metrics.SUCCESS].add(choices, "error" if failed else "abort")

    def replied(self, method: str, route: str, status: int) -> None:
        """An HTTP exchange is over."""
        self.series[metrics.HTTP_REPLIES].add(1, route, str(status))
        self.series[metrics.HTTP_REQUESTS].add(1, method, f"{status // 100}xx", route)

    def refused(self, reason: str) -> None:
        """A request was turned away at the door."""
        self.series[metrics.REJECTIONS].add(1, reason)

    def refresh(self) -> None:
        """Bring the gauges, and the counters the engine keeps, up to this moment."""
        load = self._load()
        snapshot, series = load.snapshot, self.series
        series[metrics.RUNNING].set(snapshot.running)
        series[metrics.WAITING].set(snapshot.waiting + snapshot.remote)
        series[metrics.WAITING_BY_REASON].set(snapshot.waiting, "capacity")
        series[metrics.WAITING_BY_REASON].set(snapshot.remote, "deferred")
        series[metrics.KV_USAGE].set(snapshot.kv_tokens_used / snapshot.kv_tokens_total if snapshot.kv_tokens_total else 0.0)
        series[metrics.PREEMPTIONS].set(snapshot.preemptions)
        series[metrics.SLOTS_FREE].set(snapshot.slots_free)
        series[metrics.SLOTS_TOTAL].set(snapshot.slots_total)
        series[metrics.KV_TOKENS_USED].set(snapshot.kv_tokens_used)
        series[metrics.KV_TOKENS_TOTAL].set(snapshot.kv_tokens_total)
        held = snapshot.blocks_total - snapshot.blocks_free - snapshot.blocks_cached - snapshot.blocks_limbo
        states = {"free": snapshot.blocks_free, "cached": snapshot.blocks_cached, "held": held, "limbo": snapshot.blocks_limbo}
        for state, blocks in states.items():
            series[metrics.KV_BLOCKS].set(blocks, state)
        series[metrics.KV_PINNED].set(snapshot.blocks_pinned)
        for metric, values in load.told.items():
            series[metric].values = dict.fromkeys(metric.known, 0.0) | dict(values)
        series[metrics.KV_LEDGER_WRONG].set(snapshot.ledger_wrong)
        series[metrics.PREFIX_EVICTIONS].set(snapshot.prefix_evictions)
        series[metrics.WAITING_TOKENS].set(snapshot.waiting_tokens)
        series[metrics.STEPS].set(snapshot.steps)
        series[metrics.OPEN_CALLS].set(load.calls)
        series[metrics.OPEN_SEQUENCES].set(load.sequences)

    def collect(self) -> Iterator[Family]:
        """Every family, for prometheus_client."""
        self.refresh()
        for series in self.series.values():
            yield series.family(self.base)
        for histogram in self.histograms.values():
            yield histogram.family(self.base)
        labels = dict(zip(LABELS, self.base, strict=True))
        for family in self._process.collect():
            family.samples = [sample._replace(labels=labels) for sample in family.samples]
            yield family

    def text(self) -> bytes:
        """The body of `/metrics`, this replica's part."""
        return generate_latest(self._registry)


def merged(texts: Iterable[bytes]) -> bytes:
    """Several replicas' texts as one, each family's samples together under one head as Prometheus wants them."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        family, new = [], True
        for line in text.splitlines(keepends=True):
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                new, family = name not in families, families.setdefault(name, [])
            if new or not line.startswith(b"# "):
                family.append(line)
    return b"".join(line for family in families.values() for line in family)


class RayExport:
    """The same series through `ray.util.metrics`, pushed as differences. Per-token histograms stay out (metrics.Metric.per_token)."""

    def __init__(self, telemetry: Telemetry) -> None:
        from ray.util import metrics as ray_metrics

        self._telemetry = telemetry
        self._tags = dict(zip(LABELS, telemetry.base, strict=True))
        self._sent: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._counters = {m: ray_metrics.Counter(m.ray_name, m.help, _tag_keys(m)) for m in telemetry.series if m.kind == "counter"}
        self._gauges = {m: ray_metrics.Gauge(m.ray_name, m.help, _tag_keys(m)) for m in telemetry.series if m.kind == "gauge"}
        told, made = [m for m in telemetry.histograms if not m.per_token], ray_metrics.Histogram
        self._histograms = {m: made(m.ray_name, m.help, list(m.buckets), LABELS).set_default_tags(self._tags) for m in told}

    def push(self) -> None:
        """Hand Ray what has changed since the last push."""
        self._telemetry.refresh()
        for metric, gauge in self._gauges.items():
            for labels, value in self._telemetry.series[metric].values.items():
                gauge.set(value, self._labelled(metric, labels))
        for metric, counter in self._counters.items():
            for labels, value in self._telemetry.series[metric].values.items():
                fresh = value - self._sent.get((metric, labels), 0.0)
                if fresh > 0:
                    counter.inc(fresh, self._labelled(metric, labels))
                    self._sent[metric, labels] = value
        for metric, histogram in self._histograms.items():
            recent = self._telemetry.histograms[metric].recent
            for value in recent:
                histogram.observe(value)
            recent.clear()

    def _labelled(self, metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
        return {**self._tags, **dict(zip(metric.labels, labels, strict=True))}


def _tag_keys(metric: Metric) -> tuple[str, ...]:
    return (*LABELS, *metric.labels)
