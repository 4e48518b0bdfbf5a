"""The dialect of text-generation-inference: `inputs` and `parameters`, tokens one by one."""

from __future__ import annotations

from rayneuron.api.call import Dialect
from rayneuron.api.tgi.reply import error
from rayneuron.api.tgi.request import chat_tokenize, info, parse, parse_listed, parse_stream, tokenize

GENERATE = Dialect(parse, error)
STREAM = Dialect(parse_stream, error)
ROOT = Dialect(parse_listed, error)

__all__ = ["GENERATE", "ROOT", "STREAM", "chat_tokenize", "error", "info", "tokenize"]
