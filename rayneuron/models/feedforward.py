"""Feed-forward layers: gated and plain, dense and mixtures of experts.

N tokens (B x T), E hidden, F inner size of a rank, X experts, k chosen experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.models.arch import Arch
from rayneuron.models.choice import cumsum
from rayneuron.models.ops import Ops


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh formula (gelu_new, gelu_fast, BLOOM)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def relu_squared(x: Tensor) -> Tensor:
    """The square of ReLU (Nemotron)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu2": relu_squared,
}


def feed_forward(arch: Arch, ops: Ops, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """This rank's summand of the layer [B,T,E]; the caller sums over ranks and adds `down.bias` once."""
    if "router.w" in w:
        return mixture(arch, ops, w, x)
    return dense(arch, ops, w, x)


def dense(arch: Arch, ops: Ops, w: Mapping[str, Tensor], x: Tensor, of: str = "") -> Tensor:
    """A feed-forward that every token takes; `of`: what its products' names begin with."""
    act = ACTIVATIONS[arch.act]
    if not arch.gated:
        return ops.linear(w, "down", act(ops.linear(w, "up", x)))
    if "gate_up.w" in w:
        gate, up = ops.linear(w, "gate_up", x).chunk(2, -1)
    else:
        gate, up = ops.linear(w, of + "gate", x), ops.linear(w, of + "up", x)
    return ops.linear(w, of + "down", act(gate) * up)


def mixture(arch: Arch, ops: Ops, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Router in float32, then the chosen experts only."""
    share, which = routed(arch, ops, w, x)
    if arch.capacity_factor is not None and x.shape[1] > 1:
        share = share * within_capacity(which, arch.experts, arch.capacity_factor, ops.cumsum)
    share = share.to(x.dtype)
    limit = (arch.swiglu_limit,) if arch.swiglu_limit else ()
    out = ops.experts(w, x.flatten(0, 1), which.flatten(0, 1), share.flatten(0, 1), ACTIVATIONS[arch.act], *limit)
    if not arch.shared_ffn:
        return out.view(x.shape)
    shared = dense(arch, ops, w, x, "shared_")
    return out.view(x.shape) + (ops.linear(w, "shared_router", x).sigmoid() * shared if arch.shared_gate else shared)


def routed(arch: Arch, ops: Ops, w: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Shares, float32 [B,T,k], and numbers of the chosen experts of x [B,T,E]."""
    scores = ops.linear(w, "router", x).float()
    chance = scores.sigmoid() if arch.sigmoid else scores.softmax(-1)
    if arch.corrections:
        which = ops.top_k(chance + w["corrections.w"], arch.top_k)[1]
        here = which[..., None] == torch.arange(arch.experts, dtype=which.dtype, device=which.device)
        share = (here.float() * chance[..., None, :]).sum(-1)
    else:
        share, which = ops.top_k(chance, arch.top_k)
    if arch.renormalise:
        share = share / share.sum(-1, keepdim=True)
    return (share if arch.routed_scale == 1 else share * arch.routed_scale), which


def within_capacity(which: Tensor, experts: int, factor: float, sums: Callable[[Tensor], Tensor] = cumsum) -> Tensor:
    """1 where a token is among the first `ceil(T k factor / X)` of its row that chose the expert, else 0 (NxD's dropping). which [B,T,k].

    Counted a row, so neighbours never displace a token; padding sits at the end of a row and displaces nobody.
    """
    t, k = which.shape[1:]
    capacity = min(t, math.ceil(t * k * factor / experts))
    chosen = (which[..., None] == torch.arange(experts, dtype=which.dtype, device=which.device)).float()  # B T k X
    place = sums(chosen.sum(2).transpose(1, 2)).transpose(1, 2)  # B T X
    return ((chosen * place[:, :, None]).sum(-1) <= capacity).float()
