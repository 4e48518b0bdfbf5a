"""The dialect of OpenAI's Responses: /v1/responses. Nothing is kept here between calls."""

from __future__ import annotations

from rayneuron.api.call import Dialect
from rayneuron.api.responses.request import count_tokens, parse, unknown

CREATE = Dialect(parse)

__all__ = ["CREATE", "count_tokens", "unknown"]
