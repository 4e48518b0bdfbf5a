"""The weighted sum of the experts that a router chose for every token.

N tokens (B x T), E hidden, F inner size of a rank, X experts, k chosen experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.models.linear import expert_weight

GATHERED_PAIRS = 16  # up to so many (token, expert) pairs the chosen experts' weights are gathered, above they are sorted into blocks
BLOCK = 32  # rows a block of one expert


def experts(
    w: Mapping[str, Tensor], x: Tensor, which: Tensor, share: Tensor, act: Callable[[Tensor], Tensor], limit: float = 0.0
) -> Tensor:
    """Sum over a token's chosen experts. x [N,E], which, share [N,k] -> [N,E]. Static shapes: the form every device can compile.

    `limit`: gate and up are clamped to it, and up counts from 1 (GPT-OSS).
    """
    if which.numel() <= GATHERED_PAIRS:
        return gathered_experts(w, x, which, share, act, limit)
    return blocked_experts(w, x, which, share, act, limit)


def gathered_experts(
    w: Mapping[str, Tensor], x: Tensor, which: Tensor, share: Tensor, act: Callable[[Tensor], Tensor], limit: float = 0.0
) -> Tensor:
    """For few tokens: gather the weights of the chosen experts."""
    up = _plus(w, "experts.gate_up", which, torch.einsum("nkfe,ne->nkf", expert_weight(w, "experts.gate_up", which, x.dtype), x))
    out = torch.einsum("nkef,nkf,nk->ne", expert_weight(w, "experts.down", which, x.dtype), _between(up, act, limit), share)
    bias = w.get("experts.down.b")
    return out if bias is None else out + torch.einsum("nke,nk->ne", bias[which], share)


def _plus(w: Mapping[str, Tensor], name: str, index: Tensor, y: Tensor) -> Tensor:
    bias = w.get(name + ".b")
    return y if bias is None else y + bias[index]


def _between(both: Tensor, act: Callable[[Tensor], Tensor], limit: float) -> Tensor:
    """What goes into the second product, of what came out of the first."""
    gate, up = both.chunk(2, -1)
    return act(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1) if limit else act(gate) * up


def blocked_experts(
    w: Mapping[str, Tensor], x: Tensor, which: Tensor, share: Tensor, act: Callable[[Tensor], Tensor], limit: float = 0.0
) -> Tensor:
    """For many tokens: sort the pairs by expert into blocks of one expert each. The number of blocks depends on shapes alone."""
    n, k = which.shape
    count = w["experts.down.w"].shape[0]
    pairs = which.flatten()
    order = pairs.argsort(stable=True)
    sizes = F.one_hot(pairs, count).sum(0)
    blocks = (sizes + BLOCK - 1) // BLOCK
    ends = blocks.cumsum(0)
    sorted_expert = pairs[order]
    inside = torch.arange(n * k, device=x.device) - (sizes.cumsum(0) - sizes)[sorted_expert]
    place = (ends - blocks)[sorted_expert] * BLOCK + inside  # row of each sorted pair among the padded blocks
    total = min(n * k, (n * k) // BLOCK + count)
    rows = x.new_zeros(total * BLOCK, x.shape[1]).index_copy(0, place, x[order // k])
    owner = (torch.arange(total, device=x.device)[:, None] >= ends).sum(1).clamp(max=count - 1)  # searchsorted has no XLA form
    out = [_one_block(w, owner[i], rows[i * BLOCK : (i + 1) * BLOCK], act, limit) for i in range(total)]
    summands = torch.cat(out)[place] * share.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, order // k, summands)


def _one_block(w: Mapping[str, Tensor], expert: Tensor, x: Tensor, act: Callable[[Tensor], Tensor], limit: float) -> Tensor:
    index = expert.view(1)
    both = _plus(w, "experts.gate_up", index, F.linear(x, expert_weight(w, "experts.gate_up", index, x.dtype)[0]))
    out = F.linear(_between(both, act, limit), expert_weight(w, "experts.down", index, x.dtype)[0])
    return _plus(w, "experts.down", index, out)


def grouped_experts(
    w: Mapping[str, Tensor], x: Tensor, which: Tensor, share: Tensor, act: Callable[[Tensor], Tensor], limit: float = 0.0
) -> Tensor:
    """The eager form: one product for each expert that was chosen, on exactly its tokens. Reads counts on the host; not exportable."""
    k = which.shape[1]
    pairs = which.flatten()
    order = pairs.argsort(stable=True)
    out = torch.zeros_like(x)
    start = 0
    for expert, size in enumerate(pairs.bincount(minlength=w["experts.down.w"].shape[0]).tolist()):
        if size:
            mine = order[start : start + size]
            start += size
            y = _one_block(w, torch.tensor(expert), x[mine // k], act, limit)
            out.index_add_(0, mine // k, y * share.flatten()[mine][:, None])
    return out
