"""The OpenAI dialect as one page: what the server calls, from the files that hold it."""

from __future__ import annotations

from rayneuron.api.errors import encode, error_body, error_reply, failed
from rayneuron.api.fields import clean_id, decode
from rayneuron.api.openai.chat import parse as parse_chat
from rayneuron.api.openai.completions import parse as parse_completions
from rayneuron.api.openai.tokens import detokenize, find_model, model_card, models_list, tokenize, tokenizer_info, version
from rayneuron.api.sampling import check_defaults, sampling_defaults
from rayneuron.api.stream import chunks

__all__ = [
    "check_defaults",
    "chunks",
    "clean_id",
    "decode",
    "detokenize",
    "encode",
    "error_body",
    "error_reply",
    "failed",
    "find_model",
    "model_card",
    "models_list",
    "parse_chat",
    "parse_completions",
    "sampling_defaults",
    "tokenize",
    "tokenizer_info",
    "version",
]
