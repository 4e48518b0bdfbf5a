"""The logits that tokens were chosen from, kept where somebody in this process asks for them; and as they were when the choice was made.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids

import torch
from torch import Tensor

from rayneuron.engine import logits, sampling
from rayneuron.engine.sequence import Sequence
from rayneuron.types import Request


class Kept:
    """Rows [V] of logits by request and choice, one a token, in order; before anything is edited. Written by the engine's thread."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, list[Tensor]]] = {}

    def ask(self, request_id: str) -> None:
        """Keep those of a request that reports logprobs, until they are taken."""
        self._rows[request_id] = {}

    def saw(self, sequence: Sequence, row: Tensor) -> None:
        """A token was chosen from this row."""
        if self._rows and (choices := self._rows.get(sequence.request.id)) is not None:
            choices.setdefault(sequence.index, []).append(row.clone())

    def take(self, request_id: str) -> dict[int, list[Tensor]]:
        """What was kept, by choice."""
        return self._rows.pop(request_id, {})


def processed(request: Request, eos_ids: Iterable[int], tokens: Ids[int], rows: Ids[Tensor]) -> list[Tensor]:
    """Each row [V] as its token was chosen from it, by transformers' rules: edited, and where it is drawn from, over the temperature and
    -inf where the filters leave nothing. `eos_ids`: the model's."""
    params, prompt = request.params, list(request.prompt_ids)
    ends = frozenset() if params.ignore_eos else frozenset(eos_ids)
    sequence = Sequence(request, 0, prompt, 0, len(tokens), 0, prompt_len=len(prompt), eos_ids=ends)
    sequence.stop_ids = ends | frozenset(params.stop_token_ids)
    how = params.temperature, max(params.top_k, 0), params.top_p, params.min_p, 0.0
    scores = []
    for token, row in zip(tokens, rows, strict=False):
        row = logits.edit(row, sequence) if params.edits_logits else row
        scores.append(row if params.greedy else sampling.left(row, how, params.typical_p))
        sequence.ids.append(token)
    return scores


def by_step(
    choices: Ids[tuple[Request, Ids[int], Ids[Tensor]]], eos_ids: Iterable[int] | None, pad: int
) -> tuple[Tensor, ...]:  # fmt: skip
    """Choices, each with its tokens and what was kept of them -> of each step their rows [choices, V]: `processed` with the model's
    `eos_ids`, as they were kept without. Of one that has ended, 0 for the id `pad` and -inf elsewhere."""
    rows = [
        list(kept[: len(tokens)]) if eos_ids is None else processed(request, eos_ids, tokens, kept) for request, tokens, kept in choices
    ]
    longest = max(rows, key=len, default=[])
    if not longest:
        return ()
    over = torch.full_like(longest[0], float("-inf"))
    over[pad : pad + 1] = 0.0
    return tuple(torch.stack([row[step] if step < len(row) else over for row in rows]) for step in range(len(longest)))
