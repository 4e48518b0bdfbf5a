"""The numbers on /metrics against what was done, and the names against vLLM's."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayneuron import metrics
from rayneuron.engine.timing import StepInfo
from rayneuron.serve.ingress import application
from rayneuron.serve.replica import Replica
from rayneuron.serve.telemetry import Histogram, Load, Telemetry, merged
from rayneuron.types import Request, SamplingParams, Snapshot, Stamps
from tests.serve.scripted import PATIENCE_S, Site, eventually, site

# What vLLM's dashboards, Ray's LLM dashboard and the inference gateway read.
WANTED = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:num_preemptions_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum", "vllm:request_time_per_output_token_seconds_count", "vllm:e2e_request_latency_seconds_sum",
    "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum", "vllm:request_prompt_tokens_sum", "vllm:request_generation_tokens_bucket",
    "vllm:request_params_max_tokens_sum", "vllm:request_params_n_sum", "vllm:iteration_tokens_total_count",
    "vllm:cache_config_info", "rayneuron:kv_blocks", "rayneuron:kv_ledger_wrong_total", "rayneuron:prefix_evictions_total",
    "vllm:lora_requests_info", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_by_source_total", "vllm:num_requests_waiting_by_reason",
    "vllm:request_max_num_generation_tokens_sum", "vllm:request_prefill_kv_computed_tokens_count", "http_requests_total",
}  # fmt: skip


@pytest.fixture
def running(tiny: Path) -> Iterator[Site]:
    with site(tiny) as made:
        yield made


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value, by Prometheus' own parser."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(found: dict[str, dict[tuple[tuple[str, str], ...], float]], name: str, **labels: str) -> float:
    return sum(v for k, v in found[name].items() if labels.items() <= dict(k).items())


def test_drafts_are_counted_by_their_place() -> None:
    telemetry = Telemetry("m", "0", lambda: Load(Snapshot()))
    telemetry.timed(StepInfo(drafts=[(4, 2), (3, 0), (1, 1)]))
    telemetry.timed(StepInfo(paused="cost"))
    found = {m.name: dict(telemetry.series[m].values) for m in telemetry.series if "spec_decode" in m.name}
    assert found == {
        "vllm:spec_decode_num_drafts": {(): 3},
        "vllm:spec_decode_num_draft_tokens": {(): 8},
        "vllm:spec_decode_num_accepted_tokens": {(): 3},
        "vllm:spec_decode_num_accepted_tokens_per_pos": {("0",): 2, ("1",): 1},
        "rayneuron:spec_decode_paused": {("none",): 0, ("rest",): 0, ("cost",): 1, ("behind",): 0, ("room",): 0},
    }


def test_counts_are_exact(running: Site) -> None:
    def timed() -> bool:
        """The engine thread has noted the last step too, which it does once its tokens are on their way."""
        found = samples(http.get("/metrics").text)
        return value(found, "rayneuron:steps_total") == value(found, "rayneuron:step_seconds_count")

    with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        used = [
            http.post("/v1/completions", json={"prompt": "say:hello", "max_tokens": 20}).json()["usage"],
            http.post("/v1/completions", json={"prompt": ["go", "go on"], "n": 2, "temperature": 1, "max_tokens": 7}).json()["usage"],
        ]
        assert http.post("/v1/completions", json={"prompt": 5}).status_code == 400
        eventually(timed, PATIENCE_S)
        reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    found = samples(reply.text)
    assert value(found, "vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in used)
    generated = sum(u["completion_tokens"] for u in used)
    assert value(found, "vllm:generation_tokens_total") == value(found, "vllm:request_generation_tokens_sum") == generated
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(found, "vllm:request_success_total", finished_reason="length") == 4
    assert value(found, "vllm:time_to_first_token_seconds_count") == 3  # requests
    assert value(found, "vllm:e2e_request_latency_seconds_count") == 5  # choices
    assert value(found, "vllm:inter_token_latency_seconds_count") == generated - 5
    assert value(found, "vllm:request_params_n_sum") == 1 + 2 + 2
    assert value(found, "vllm:iteration_tokens_total_sum") == generated + sum(u["prompt_tokens"] for u in used)
    assert value(found, "vllm:prompt_tokens_by_source_total", source="local_compute") == sum(u["prompt_tokens"] for u in used)
    assert value(found, "vllm:request_prefill_kv_computed_tokens_sum") == sum(u["prompt_tokens"] for u in used)
    assert value(found, "vllm:request_max_num_generation_tokens_count") == 3  # requests: the longest choice of each
    assert value(found, "vllm:request_max_num_generation_tokens_sum") == used[0]["completion_tokens"] + 7 + 7
    assert value(found, "http_requests_total", method="POST", handler="/v1/completions", status="4xx") == 1
    assert value(found, "rayneuron:step_seconds_count") > 0
    assert value(found, "rayneuron:http_replies_total", route="/v1/completions", status="400") == 1
    assert value(found, "rayneuron:slots_free") == value(found, "rayneuron:slots_total") == 4
    labels = {k for series in found.values() for key in series for k, v in key if (k, v) in (("model_name", "scripted"), ("engine", "0"))}
    assert labels == {"model_name", "engine"}
    assert WANTED <= set(found) and "process_resident_memory_bytes" in found


def test_everything_is_there_before_the_first_request(running: Site) -> None:
    """Every family of ours has a sample at the first scrape, so that a rate over the first request of all is not lost."""
    text = httpx.get(f"{running.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(families[metric.name].samples for metric in metrics.METRICS)
    found = samples(text)
    assert WANTED <= set(found)
    assert {dict(key)["finished_reason"] for key in found["vllm:request_success_total"]} == {"stop", "length", "abort", "error"}
    assert {dict(key)["reason"] for key in found["vllm:num_requests_waiting_by_reason"]} == {"capacity", "deferred"}
    sources = {"local_compute", "local_cache_hit", "external_kv_transfer"}
    assert {dict(key)["source"] for key in found["vllm:prompt_tokens_by_source_total"]} == sources
    (config,) = [dict(key) for key in found["vllm:cache_config_info"]]
    held = value(found, "rayneuron:kv_tokens_total")
    assert int(config["block_size"]) * int(config["num_gpu_blocks"]) == held and config["enable_prefix_caching"] == "False"
    assert all(v == 0 for name in found if name.endswith("_total") and name.startswith("vllm:") for v in found[name].values())


def test_texts_of_several_replicas_become_one() -> None:
    """Every replica's samples, each family under one head (a second head is a syntax error to Prometheus), also of another version."""
    texts = []
    for number in "01":
        telemetry = Telemetry("m", number, lambda: Load(Snapshot(slots_total=4), 0, 0))
        telemetry.prefilled(5 + int(number), 0, 0.1)
        texts.append(telemetry.text())
    older = texts[1].replace(b"Prompt tokens of requests whose prefill finished.", b"Said otherwise once.")
    text = merged([texts[0], older]).decode()
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) and "Said otherwise" not in text
    found = samples(text)
    assert [value(found, "vllm:prompt_tokens_total", engine=number) for number in "01"] == [5, 6]
    assert found == samples(texts[0].decode()) | {
        name: samples(texts[0].decode())[name] | values for name, values in samples(texts[1].decode()).items()
    }


def test_times_add_up(running: Site) -> None:
    """Queue, prefill and decode time are the request's whole time."""
    with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        for _ in range(3):
            http.post("/v1/completions", json={"prompt": "go on", "max_tokens": 20, "ignore_eos": True})
        found = samples(http.get("/metrics").text)
    parts = [value(found, f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(value(found, "vllm:e2e_request_latency_seconds_sum"), abs=1e-9)
    assert value(found, "vllm:time_to_first_token_seconds_sum") <= value(found, "vllm:e2e_request_latency_seconds_sum") + 0.5


def test_gauges_while_something_runs(running: Site) -> None:
    from tests.serve.wire import Wire

    running.runner.hold()
    wires = [Wire(running) for _ in range(6)]
    for wire in wires:
        wire.post("/v1/completions", {"prompt": "go", "max_tokens": 50, "stream": True})
    eventually(lambda: running.server.served.flights.sequences == 6, PATIENCE_S, running.idle)
    running.runner.allow(2)
    eventually(lambda: running.server.served.engine.snapshot().running == 4, PATIENCE_S, running.idle)
    found = samples(httpx.get(f"{running.url}/metrics").text)
    assert value(found, "vllm:num_requests_running") == 4 and value(found, "vllm:num_requests_waiting") == 2
    assert value(found, "rayneuron:open_sequences") == value(found, "rayneuron:open_calls") == 6
    assert 0 < value(found, "vllm:kv_cache_usage_perc") <= 1
    for wire in wires:
        wire.drop()
    running.runner.free()
    running.settle()
    assert value(samples(httpx.get(f"{running.url}/metrics").text), "vllm:kv_cache_usage_perc") == 0


def test_a_histogram_keeps_the_exact_sum() -> None:
    """The boundaries belong to the bucket below, as Prometheus has it; the sum is of the values, not of bucket middles."""
    histogram = Histogram(metrics.TTFT)
    for observed in (0.001, 0.0011, 0.5, 0.5, 5000.0):
        histogram.observe(observed)
    family = {s.labels["le"]: s.value for s in histogram.family(("m", "0")).samples if s.name.endswith("_bucket")}
    assert (family["0.001"], family["0.005"], family["0.5"], family["2560.0"], family["+Inf"]) == (1, 2, 4, 4, 5)
    assert histogram.sum == math.fsum((0.001, 0.0011, 0.5, 0.5, 5000.0))


def test_every_name_once_and_well_formed() -> None:
    names = [metric.name for metric in metrics.METRICS]
    assert len(set(names)) == len(names) > 30
    for metric in metrics.METRICS:
        assert metric.name.partition(":")[0] in ("vllm", "rayneuron", "http_requests") and ":" not in metric.ray_name
        assert (metric.kind == "histogram") == bool(metric.buckets) and list(metric.buckets) == sorted(set(metric.buckets))
    assert set(Stamps.__struct_fields__) == set(metrics.TRACE_POINTS)


async def test_a_span_a_choice(tiny: Path) -> None:
    """The stamps in order, under the caller's own trace; a choice that is cut off has a span too."""
    pytest.importorskip("opentelemetry.sdk", reason="spans need opentelemetry-sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from rayneuron.serve.trace import Tracer
    from tests.serve.scripted import opener_of

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = Replica({"model": {"path": str(tiny), "name": "scripted"}}, opener_of(tiny))
    server._tracer = Tracer("scripted", provider)
    await server.open()
    transport = httpx.ASGITransport(application(server))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        traced = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        body = {"prompt": ["say:hello", "go"], "n": 2, "temperature": 1.0, "max_tokens": 10}
        assert (await http.post("/v1/completions", json=body, headers=traced)).status_code == 200
    runner = server.served.opened.engine.runner
    runner.hold()  # the stream must not end by itself before it is closed
    runner.allow(2)
    stream = server.generate("go on", {"max_tokens": 200, "ignore_eos": True})
    await anext(stream)
    await stream.aclose()
    runner.free()
    await server.close()
    spans = exporter.get_finished_spans()
    assert len(spans) == 5
    for span in spans[:4]:
        assert f"{span.context.trace_id:x}" == "ab" * 16 and f"{span.parent.span_id:x}" == "cd" * 8
        names = [event.name for event in span.events]
        assert names == [name for name in metrics.TRACE_POINTS if name in names] and {"arrived", "first_token", "finished"} <= set(names)
        times = [event.timestamp for event in span.events]
        assert times == sorted(times) and span.start_time == times[0] and span.end_time == times[-1]
        assert abs(span.end_time / 1e9 - time.time()) < 60
        assert not any("hello" in str(value) for value in span.attributes.values())
    assert spans[4].attributes["gen_ai.response.finish_reasons"] == ("abort",) and spans[4].parent is None


class FakeRay:
    """Records what Ray would be told."""

    def __init__(self) -> None:
        self.told: dict[str, list[float]] = {}

    def kind(self, name: str, description: str, *_: object) -> object:
        told = self.told.setdefault(name, [])

        class Series:
            def inc(self, amount: float, tags: dict[str, str] | None = None) -> None:
                told.append(amount)

            set = observe = inc

            def set_default_tags(self, tags: dict[str, str]) -> object:
                return self

        return Series()


def test_ray_gets_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushed twice, a counter arrives once; per-token histograms stay out."""
    from ray.util import metrics as ray_metrics

    from rayneuron.serve.telemetry import RayExport

    fake = FakeRay()
    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray_metrics, name, fake.kind)
    telemetry = Telemetry("m", "0", lambda: Load(Snapshot(running=2, slots_total=4, kv_tokens_used=5, kv_tokens_total=10), 1, 2))
    export = RayExport(telemetry)
    telemetry.step(5, 0)
    telemetry.asked(Request(id="r", prompt_ids=[1, 2], params=SamplingParams()))
    telemetry.finished("stop", 3, Stamps(arrived=1.0, scheduled=2.0, first_token=3.0, finished=5.0), 5.0)
    export.push()
    telemetry.step(2, 0)
    export.push()
    export.push()
    assert fake.told["vllm_generation_tokens"] == [5, 2]
    assert fake.told["vllm_request_success"] == [1]
    assert fake.told["vllm_kv_cache_usage_perc"] == [0.5] * 3
    assert fake.told["vllm_e2e_request_latency_seconds"] == [4.0] and fake.told["vllm_request_time_per_output_token_seconds"] == [1.0]
    assert "vllm_inter_token_latency_seconds" not in fake.told
