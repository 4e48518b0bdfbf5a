"""Next tokens from logits, per row, on the device: greedy, temperature, top-k, top-p, min-p.

Shapes: B rows, V vocabulary, C candidates. Randomness is an input: one uniform number a row, drawn from (seed, position) alone,
so that a request's draw never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayneuron.devices import host
from rayneuron.models import choice
from rayneuron.models.ops import PLAIN, Ops

CANDIDATES = 256  # NxD Inference's global_topk; a nucleus that is larger is sampled on the host


def uniforms(seeds: Sequence[int], counters: Sequence[int]) -> NDArray[np.float32]:
    """One float32 in [0, 1) a row: splitmix64's finaliser over seed and counter (Steele et al., OOPSLA 2014)."""
    mask = 2**64 - 1
    x = np.array([s & mask for s in seeds], np.uint64)
    n = np.array(counters, np.uint64)
    with np.errstate(over="ignore"):
        x = _mix(x) + (n + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = _mix(x)
    number: NDArray[np.float32] = (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return number


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor, candidates: int = CANDIDATES,
    ops: Ops = PLAIN,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[B, V] float32 and [B] parameters -> ids [B] int32, complete [B] bool.

    Filters follow transformers: temperature, then top-k, then top-p renormalised over what top-k left (the token that crosses top_p
    is kept), then min-p relative to the likeliest. A row without filters draws from the whole vocabulary. A row with filters draws
    among its `candidates` likeliest tokens; `complete` is False where the kept set may reach beyond them. Temperature 0 is greedy.
    """
    cold = temperature <= 0
    scaled = logits / torch.where(cold, 1.0, temperature)[:, None]
    top, ids = ops.shortlist(scaled, candidates)
    kept, inside = _keep(top, ops.log_sum(scaled), top_k, top_p, min_p, ops)
    chosen = ids.gather(-1, choice.pick(torch.where(kept, (top - top[:, :1]).exp(), 0.0), uniform, ops.cumsum)[:, None])[:, 0]
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    drawn = torch.where(filtered, chosen, ops.draw(scaled, uniform)).to(torch.int32)
    everything = top.shape[-1] == logits.shape[-1] * ops.parts
    return torch.where(cold, ops.likeliest(logits), drawn), cold | ~filtered | inside | everything


def on_host(row: Tensor, how: tuple[float, int, float, float, float], mask: NDArray[np.uint32] | None = None) -> int:
    """`sample` of one row [V] with the whole vocabulary as candidates; by the CPU's kernels where they are built, whatever the device is.
    `how`: temperature, top_k, top_p, min_p, uniform. `mask`: a bit for each id that may come; -1 where none can."""
    drawn = host.draw([row], [how], [mask])
    if drawn is not None:
        return drawn[0]
    if mask is not None and (row := masked(row, mask)).max() == float("-inf"):
        return -1
    temperature, top_k, top_p, min_p, uniform = (torch.tensor([value]) for value in how)
    return int(sample(row[None], temperature, top_k, top_p, min_p, uniform, candidates=len(row))[0])


def left(row: Tensor, how: tuple[float, int, float, float, float], mass: float) -> Tensor:
    """A row [V] over its temperature, of which stays what the filters of `how` keep and, below a `mass` of 1, is locally typical (Meister
    et al. 2022): of the ids whose surprise is nearest to the expected one, the fewest that have that mass. As transformers, it is the
    last filter."""
    temperature, top_k, top_p, min_p, _ = how
    top, ids = choice.shortlist((row.double() / temperature)[None], len(row))
    kept, _ = _keep(top, choice.log_sum_exp(top), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]), PLAIN)
    values = top[kept]
    if mass < 1.0:
        logp = values.log_softmax(-1)
        p = logp.exp()
        far = (-logp + (p * logp).where(p > 0, 0.0).sum()).abs()  # of each one's surprise from the entropy
        order = far.argsort(stable=True)
        last = int((p[order].cumsum(-1) < mass).sum().clamp(max=len(p) - 1))
        values = values.where(far <= far[order[last]], float("-inf"))
    return torch.full_like(row, float("-inf")).scatter(0, ids[kept], values.to(row.dtype))


def masked(row: Tensor, mask: NDArray[np.uint32]) -> Tensor:
    """A copy of a row [V] without what a mask forbids."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(row))
    return torch.where(torch.from_numpy(bits).bool(), row, float("-inf"))


def _keep(top: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
    """Sorted logits [B, C] and log normaliser [B, 1] -> kept [B, C], inside [B] (nothing beyond C would be kept)."""
    place = torch.arange(top.shape[-1], dtype=torch.int32, device=top.device)
    limit = torch.where(top_k > 0, top_k, 2**31 - 1)[:, None]
    within = place < limit
    bounded = (top_k > 0) & (top_k <= top.shape[-1])
    total = torch.where(bounded[:, None], choice.log_sum_exp(torch.where(within, top, choice.LOWEST)), mass)
    p = (top - total).exp()
    before = ops.cumsum(p) - p
    kept = within & (before < top_p[:, None]) & (p >= min_p[:, None] * p[:, :1])
    return kept | (place == 0), bounded | ~kept[:, -1]
