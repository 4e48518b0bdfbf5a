"""Dashboards for Grafana and alerts for Prometheus, made from the names in rayneuron/metrics.py."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rayneuron.metrics import METRICS, Gateway, HostMetrics, Metric

EVERY = (*METRICS, *(f.default for kind in (Gateway, HostMetrics) for f in fields(kind)))

BY = "model_name"
MINUTES = "5m"
WIDE, HIGH, ACROSS = 12, 8, 2
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def exposed(metric: Metric) -> str:
    """Its name on /metrics, as counters are exposed there."""
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def selected(metric: Metric, suffix: str = "") -> str:
    """Its series of the models that were chosen above the panels."""
    return f'{exposed(metric)}{suffix}{{model_name=~"$model"}}'


def expressions(metric: Metric) -> dict[str, str]:
    """What a panel of it draws, by legend: a gauge as it is, a counter's rate, a histogram's quantiles; by model and its own labels."""
    by = ", ".join((BY, *metric.labels))
    legend = " ".join(f"{{{{{label}}}}}" for label in (BY, *metric.labels))
    if metric.kind == "gauge":
        return {legend: f"sum by ({by}) ({selected(metric)})"}
    if metric.kind == "counter":
        return {legend: f"sum by ({by}) (rate({selected(metric)}[{MINUTES}]))"}
    rate = f"sum by (le, {by}) (rate({selected(metric, '_bucket')}[{MINUTES}]))"
    return {f"p{q} {legend}": f"histogram_quantile({q / 100}, {rate})" for q in (50, 90, 99)}


def unit(metric: Metric) -> str:
    """Grafana's name of its unit."""
    if metric.name.endswith("_seconds"):
        return "s"
    return "percentunit" if metric.name.endswith("_perc") else "short"


def panel(number: int, metric: Metric) -> dict[str, Any]:
    """One time series, placed by its number."""
    row, column = divmod(number, ACROSS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": exposed(metric),
        "description": metric.help,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDE, "y": row * HIGH, "w": WIDE, "h": HIGH},
        "fieldConfig": {"defaults": {"unit": unit(metric), "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "legendFormat": legend, "expr": expression}
            for i, (legend, expression) in enumerate(expressions(metric).items())
        ],
    }


def board(title: str, metrics: list[Metric], named: str) -> dict[str, Any]:
    """One dashboard over some metrics. `named`: the one whose models can be chosen."""
    models = {"name": "model", "type": "query", "datasource": SOURCE, "query": f"label_values({named}, {BY})"}
    return {
        "uid": title.replace(" ", "-"),
        "title": title,
        "tags": ["rayneuron"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {**models, "multi": True, "includeAll": True, "allValue": ".*", "refresh": 2},
            ]
        },
        "panels": [panel(i, metric) for i, metric in enumerate(metrics)],
    }


def boards() -> dict[str, dict[str, Any]]:
    """By file name: what clients feel, what the engine does, and the gateway and the host where there are such."""
    rest = [m for m in EVERY if not m.name.endswith("_info")]  # the value of those is their labels
    rooms = {"gateway": "rayneuron:gateway_", "host": "rayneuron:host_", "engine": "rayneuron:", "requests": ""}
    out = {}
    for name, prefix in rooms.items():
        mine = [m for m in rest if m.name.startswith(prefix)]
        rest = [m for m in rest if m not in mine]
        if mine:
            out[name] = board(f"rayneuron {name}", mine, "rayneuron:host_models" if name == "host" else "vllm:num_requests_running")
    return out


def alerts() -> dict[str, Any]:
    """A PrometheusRule."""
    rules = [
        alert("LedgerWrong", "critical", "0m", 'increase(rayneuron:kv_ledger_wrong_total[10m]) > 0',
              "The KV ledger of {{ $labels.model_name }} does not balance; restart the replica and report its log."),
        alert("NoAnswers", "critical", "2m",
              'sum by (model_name) (rayneuron:open_calls) > 0 and sum by (model_name) (rate(rayneuron:steps_total[2m])) == 0',
              "{{ $labels.model_name }} has open calls and runs no step."),
        alert("QueueGrows", "warning", "10m",
              'sum by (model_name) (vllm:num_requests_waiting) > sum by (model_name) (rayneuron:slots_total)',
              "More requests wait for {{ $labels.model_name }} than it can run at once; add replicas or rows."),
        alert("FirstTokenLate", "warning", "10m",
              'histogram_quantile(0.99, sum by (le, model_name) (rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 10',
              "One in a hundred requests to {{ $labels.model_name }} waits more than 10 s for its first token."),
        alert("Preempting", "warning", "10m", 'sum by (model_name) (rate(vllm:num_preemptions_total[5m])) > 1',
              "{{ $labels.model_name }} computes sequences again for want of KV; raise kv_cache_tokens or lower max_num_seqs."),
        alert("Errors", "critical", "5m",
              'sum by (model_name) (rate(vllm:request_success_total{finished_reason="error"}[5m])) > 0',
              "Requests to {{ $labels.model_name }} end with an error; the replica's log has their ids."),
        alert("WakesFail", "critical", "0m", 'increase(rayneuron:host_wakes_total{outcome="failed"}[15m]) > 0',
              "{{ $labels.model_name }} was called and could not be started; /debug/hosts says why."),
        alert("Asleep", "warning", "10m", 'rayneuron:host_calls_held > 0 and on (model_name) rayneuron:host_models{state="sleeping"} > 0',
              "Calls to {{ $labels.model_name }} are held and no cores can be had for it; add nodes, or lower what is pinned."),
        alert("ForeignCores", "warning", "10m", 'rayneuron:host_cores{state="foreign"} > 0',
              "Processes that are nobody's here hold cores of {{ $labels.node }}: see `rayneuron doctor` there."),
    ]  # fmt: skip
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "rayneuron"},
        "spec": {"groups": [{"name": "rayneuron", "rules": rules}]},
    }


def alert(name: str, severity: str, lasting: str, expression: str, said: str) -> dict[str, Any]:
    """One rule."""
    return {
        "alert": f"Rayneuron{name}", "expr": expression, "for": lasting,
        "labels": {"severity": severity}, "annotations": {"summary": said},
    }  # fmt: skip
