"""Verbs of a choice among the vocabulary, in plain torch.

B rows, V vocabulary, C candidates. Where ranks share a vocabulary a device's own forms take a rank's part of the logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BELOW_ONE = 1.0 - 2.0**-23
LOWEST = -1e30  # for what must not be chosen: finite, also over a temperature, since not every device bears infinities


def cumsum(x: Tensor) -> Tensor:
    """Cumulative sums along the last dim."""
    return x.cumsum(-1)


def likeliest(logits: Tensor) -> Tensor:
    """[..., V] -> ids [...] int32; the lowest id among equals."""
    return logits.argmax(-1).to(torch.int32)


def shortlist(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[B, V] -> the `count` largest, descending, and their ids int64: [B, C] each."""
    values, ids = logits.topk(min(count, logits.shape[-1]), -1)
    return values, ids


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """[B, V], uniform [B] -> an id [B] int64 of probability softmax, by inverting the cumulative sums in order of ids."""
    return pick((logits - logits.amax(-1, keepdim=True)).exp(), uniform, cumsum)


def whole(logits: Tensor) -> Tensor:
    """Logits as the host is given them."""
    return logits


def log_sum_exp(x: Tensor) -> Tensor:
    """log(sum(exp(x))) of the last dim, kept, as [..., 1]; torch's own compares with infinity."""
    most = x.amax(-1, keepdim=True)
    return most + (x - most).exp().sum(-1, keepdim=True).log()


def pick(weights: Tensor, uniform: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """Inverse of the cumulative sum: weights [B, N] >= 0, uniform [B] -> index [B] int64 of positive weight."""
    reached = sums(weights)
    return below(weights, reached, threshold(uniform, reached[:, -1:]))


def threshold(uniform: Tensor, total: Tensor) -> Tensor:
    """uniform [B] of total [B, 1], and below it."""
    return torch.minimum(uniform[:, None] * total, total * BELOW_ONE)


def below(weights: Tensor, reached: Tensor, target: Tensor) -> Tensor:
    """The index [B] where cumulative sums [B, N] pass target [B, 1]; none behind the last weight, however the sums were rounded."""
    at = torch.arange(weights.shape[-1], dtype=torch.int64, device=weights.device)
    return torch.minimum((reached <= target).sum(-1), torch.where(weights > 0, at, 0).amax(-1))
