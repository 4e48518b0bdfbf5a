"""Host-side work on one row of logits, for the rows that ask: penalties, bans, bias, logprobs.

Shapes: V vocabulary, T prompt positions.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayneuron.devices import host
from rayneuron.engine.sequence import Sequence
from rayneuron.types import TokenLogprobs

Row = NDArray[np.float32]
BANNED = float("-inf")
FLOAT = np.finfo(np.float32)


def edit(logits: Tensor, sequence: Sequence) -> Tensor:
    """A copy of a row [V] with every processor of the request applied. In numpy: torch would wake threads that then spin beside the step's.

    Repetition penalty counts prompt and output (Keskar et al. 2019, as transformers); presence and frequency penalties
    count output only (OpenAI).
    """
    params = sequence.params
    row: Row = logits.numpy().copy()
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(sequence.ids, np.int64))
        row[seen] = _repeated(row[seen], params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(np.asarray(sequence.ids[sequence.prompt_len :], np.int64), return_counts=True)
        row[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    if params.logit_bias:
        row[list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), np.float32)
    return torch.from_numpy(_ban(row, sequence))


def _repeated(value: Row, penalty: float) -> Row:
    """Logits of tokens seen before. Finite whatever the penalty: an infinite one would make probabilities that are no numbers."""
    factor = np.clip(penalty, FLOAT.tiny, FLOAT.max).astype(np.float32)
    with np.errstate(over="ignore"):
        changed = np.where(value > 0, value / factor, value * factor)
    finite: Row = np.clip(changed, FLOAT.min, FLOAT.max)
    return finite


def _ban(row: Row, sequence: Sequence) -> Row:
    params = sequence.params
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        only = np.full_like(row, BANNED)
        only[allowed] = row[allowed]
        row = only
    banned = set(params.banned_token_ids)
    banned.update(_phrase_ends(sequence.ids, params.bad_words_ids))
    if params.no_repeat_ngram_size:
        banned.update(_repeats(sequence.ids, params.no_repeat_ngram_size))
    if sequence.generated < params.min_tokens:
        banned.update(sequence.stop_ids)
    if banned and len(banned) < row.shape[0]:
        row[sorted(banned)] = BANNED
    return row


def _phrase_ends(ids: Ids[int], phrases: Ids[Ids[int]]) -> list[int]:
    """The last token of every phrase whose beginning was just written."""
    return [p[-1] for p in phrases if len(p) == 1 or list(ids[len(ids) - len(p) + 1 :]) == list(p[:-1])]


def _repeats(ids: Ids[int], size: int) -> set[int]:
    """Tokens that would complete an n-gram that occurred before, in prompt or output (as transformers)."""
    if len(ids) < size:
        return set()
    seen = np.asarray(ids)
    if size == 1:
        return set(ids)
    windows = np.lib.stride_tricks.sliding_window_view(seen, size)
    return set(windows[(windows[:, :-1] == seen[len(seen) - size + 1 :]).all(1)][:, -1].tolist())


def logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probability of `token` under a row [V] of unedited logits, its rank, and the `count` likeliest."""
    return prompt_logprobs(logits[None], [token], count)[0]


def prompt_logprobs(logits: Tensor, tokens: Ids[int], count: int) -> list[TokenLogprobs]:
    """The same for positions [T, V]: row i predicts tokens[i]. By the CPU's kernels where they are built."""
    wanted = torch.tensor(tokens)
    told = host.describe(logits, wanted, count) or describe(logits, wanted, count)
    rows = zip(tokens, *(t.tolist() for t in told), strict=True)
    return [TokenLogprobs(t, p, r, tuple(zip(i, v, strict=True))) for t, p, r, i, v in rows]


def describe(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T,V], tokens [T] -> log-probability [T] and rank [T] of each, ids and log-probabilities [T,count] of the likeliest."""
    logp = logits.double().log_softmax(-1)
    own = logp.gather(1, tokens[:, None])
    values, ids = logp.topk(count, dim=-1)
    return own[:, 0], (logp > own).sum(-1) + 1, ids, values
