"""The OpenAI dialect as one page: what the server calls, from the files that hold it."""

from __future__ import annotations

from rayneuron.api.body import check_defaults, sampling_defaults
from rayneuron.api.call import Dialect
from rayneuron.api.fields import clean_id, decode
from rayneuron.api.openai.chat import parse as parse_chat
from rayneuron.api.openai.chat import reserved
from rayneuron.api.openai.completions import parse as parse_completions
from rayneuron.api.openai.embeddings import parse_embeddings, parse_pooling, parse_rerank, parse_score
from rayneuron.api.openai.tokens import detokenize, find_model, model_card, models_list, tokenize, tokenizer_info, version
from rayneuron.api.stream import chunks, prompts

CHAT = Dialect(parse_chat)
COMPLETIONS = Dialect(parse_completions)
EMBEDDINGS, POOLING, SCORE, RERANK = map(Dialect, (parse_embeddings, parse_pooling, parse_score, parse_rerank))

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "EMBEDDINGS",
    "POOLING",
    "RERANK",
    "SCORE",
    "check_defaults",
    "chunks",
    "clean_id",
    "decode",
    "detokenize",
    "find_model",
    "model_card",
    "models_list",
    "parse_chat",
    "parse_completions",
    "prompts",
    "reserved",
    "sampling_defaults",
    "tokenize",
    "tokenizer_info",
    "version",
]
