"""The dialect of Anthropic's Messages: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from rayneuron.api.anthropic.reply import error
from rayneuron.api.anthropic.request import count_tokens, parse
from rayneuron.api.call import Dialect

MESSAGES = Dialect(parse, error)

__all__ = ["MESSAGES", "count_tokens", "error"]
