"""OpenTelemetry: one span a choice, the seven stamps of its life as events, under the caller's own trace where it sent one.

Spans go to the process's tracer provider: Ray Serve's `tracing_config`, or whatever the SDK's own environment variables set up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rayneuron.errors import ConfigError
from rayneuron.metrics import TRACE_POINTS
from rayneuron.types import FinishReason, Request, Stamps

log = logging.getLogger(__name__)

OnEnd = Callable[[int, FinishReason, int, Stamps], None]  # choice, reason, generated tokens, stamps


class Tracer:
    """Makes the spans of one replica. ConfigError where OpenTelemetry is not installed."""

    def __init__(self, model_name: str, provider: Any = None) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError as missing:
            raise ConfigError("serving.trace needs OpenTelemetry: pip install opentelemetry-sdk; or leave trace out") from missing
        self._extract, self._inject, self._within = propagate.extract, propagate.inject, trace.set_span_in_context
        self._kind = trace.SpanKind.SERVER
        provider = provider or trace.get_tracer_provider()
        if not hasattr(provider, "add_span_processor"):
            log.warning("serving.trace is on, but no OpenTelemetry tracer provider is configured in this process: spans go nowhere")
        self._tracer = provider.get_tracer("rayneuron")
        self._model_name = model_name
        self._epoch_ns = time.time_ns() - time.monotonic_ns()  # stamps are monotonic seconds, spans want nanoseconds since 1970

    def begin(self, request: Request, headers: Mapping[bytes, bytes], name: str = "generate") -> OnEnd:
        """What to call when a choice of `request` ends; `headers` may hold the caller's traceparent. The span of choice 0 begins now, and
        is what others name as their parent (`Request.trace`)."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items() if name.startswith(b"trace")}
        parent = self._extract(carrier)
        first = self._tracer.start_span(name, context=parent, kind=self._kind, start_time=self._ns(request.arrival_s or time.monotonic()))
        made: dict[str, str] = {}
        self._inject(made, self._within(first))
        request.trace = made.get("traceparent", "")
        return partial(self._end, request, name, parent, first)

    def _end(
        self, request: Request, name: str, parent: Any, first: Any, index: int, reason: FinishReason, tokens: int, stamps: Stamps
    ) -> None:
        attributes = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": request.id,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
            "gen_ai.usage.output_tokens": tokens,
            "rayneuron.choice": index,
        }
        start = self._ns(stamps.arrived)
        span = first if not index else self._tracer.start_span(name, context=parent, kind=self._kind, start_time=start)
        span.set_attributes(attributes)
        for point in TRACE_POINTS:
            reached_s = getattr(stamps, point)
            if reached_s:
                span.add_event(point, timestamp=self._ns(reached_s))
        span.end(end_time=self._ns(stamps.finished))

    def _ns(self, stamp_s: float) -> int:
        return self._epoch_ns + round(stamp_s * 1e9)
