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
        self._extract = propagate.extract
        self._kind = trace.SpanKind.SERVER
        provider = provider or trace.get_tracer_provider()
        if not hasattr(provider, "add_span_processor"):
            log.warning("serving.trace is on, but no OpenTelemetry tracer provider is configured in this process: spans go nowhere")
        self._tracer = provider.get_tracer("rayneuron")
        self._model_name = model_name
        self._epoch_ns = time.time_ns() - time.monotonic_ns()  # stamps are monotonic seconds, spans want nanoseconds since 1970

    def begin(self, request: Request, headers: Mapping[bytes, bytes]) -> OnEnd:
        """What to call when a choice of `request` ends; `headers` may hold the caller's traceparent."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items() if name.startswith(b"trace")}
        return partial(self._end, request, self._extract(carrier))

    def _end(self, request: Request, parent: Any, index: int, reason: FinishReason, tokens: int, stamps: Stamps) -> None:
        attributes = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": request.id,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
            "gen_ai.usage.output_tokens": tokens,
            "rayneuron.choice": index,
        }
        start = self._ns(stamps.arrived)
        span = self._tracer.start_span("generate", context=parent, kind=self._kind, start_time=start, attributes=attributes)
        for name in TRACE_POINTS:
            reached_s = getattr(stamps, name)
            if reached_s:
                span.add_event(name, timestamp=self._ns(reached_s))
        span.end(end_time=self._ns(stamps.finished))

    def _ns(self, stamp_s: float) -> int:
        return self._epoch_ns + round(stamp_s * 1e9)
