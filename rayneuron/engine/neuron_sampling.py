"""On-device sampling as NxD Inference does it, edge cases included (`on_device_sampling.neuron_compat`).

Shapes: B rows, V vocabulary, C candidates. Its three parameters a row are [top_k, top_p, temperature]. It differs from
`engine.sampling`: the token that crosses top_p is dropped, not kept; top_k -1 or 0 draws evenly among the candidates; min_p is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rayneuron.errors import ConfigError, RequestError
from rayneuron.models.choice import LOWEST
from rayneuron.models.ops import PLAIN, Ops
from rayneuron.types import SamplingParams

if TYPE_CHECKING:
    from rayneuron.config import Deployment

MASKED = -3000.0


@dataclass(frozen=True, slots=True)
class NeuronSampling:
    """NxD's OnDeviceSamplingConfig, and top_p_min_tokens of transformers-neuronx.

    do_sample False and not dynamic: argmax. dynamic: each row's own parameters; otherwise top_k, top_p, temperature of here.
    deterministic: the uniform number is 0.5. global_topk: candidates kept before all filters, 0 for the whole vocabulary.
    """

    do_sample: bool = False
    dynamic: bool = True
    deterministic: bool = False
    global_topk: int = 256
    top_k: int = 1
    top_p: float = 1.0
    temperature: float = 1.0
    top_p_min_tokens: int = 1

    def __post_init__(self) -> None:
        if self.global_topk < 0 or self.top_p_min_tokens < 1:
            raise ConfigError("sampling.global_topk is at least 0, and top_p_min_tokens at least 1")
        check(self.top_k, self.top_p, self.temperature, self.global_topk)


def rule_of(config: Deployment) -> NeuronSampling | None:
    """The rule a deployment asks for; None for the usual one, transformers'."""
    said = config.on_device_sampling
    if not said.neuron_compat:
        return None
    return NeuronSampling(deterministic=said.deterministic, global_topk=said.global_topk, top_p_min_tokens=said.top_p_min_tokens)


def check(top_k: float, top_p: float, temperature: float, global_topk: int = 256) -> None:
    """NxD's validation of one row's parameters. Raises RequestError."""
    if top_k != int(top_k) or top_k < -1 or (global_topk and top_k > global_topk):
        raise RequestError(f"top_k {top_k} must be -1 or a whole number from 0 to {global_topk or 'the vocabulary'}", param="top_k")
    if not 0 < top_p <= 1:
        raise RequestError(f"top_p {top_p} must be in (0, 1]", param="top_p")
    if temperature < 0:
        raise RequestError(f"temperature {temperature} must be at least 0", param="temperature")
    if temperature == 0 and top_k in (-1, 0):
        raise RequestError("temperature 0 with top_k -1 or 0 would draw evenly; write top_k: 1 for greedy", param="temperature")


def check_request(params: SamplingParams, rule: NeuronSampling) -> None:
    """Refuse what this rule has no meaning for. Greedy requests always pass: as the vLLM plugin, they are sent as (1, 1.0, 1.0)."""
    for name in ("min_p",) * bool(params.min_p) + ("typical_p",) * (params.typical_p < 1.0):
        raise RequestError(f"{name} is unknown to on_device_sampling.neuron_compat; leave it out", param=name)
    if not params.greedy:
        check(params.top_k, params.top_p, params.temperature, rule.global_topk)


def sample(
    logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, uniform: Tensor, rule: NeuronSampling, ops: Ops = PLAIN
) -> tuple[Tensor, Tensor]:
    """[B, V] float32 and [B] parameters -> ids [B] int32, complete [B] bool (always: what is beyond the candidates is never drawn).

    A row of temperature 0 becomes (1, 1.0, 1.0), as the vLLM plugin writes it; sent as it is, NxD would divide by zero and switch
    top_p off for the whole batch.
    """
    if not (rule.do_sample or rule.dynamic):
        ids = ops.likeliest(logits)
        return ids, torch.ones_like(ids, dtype=torch.bool)
    if not rule.dynamic:
        top_k, top_p, temperature = (
            torch.full_like(x, value) for x, value in ((top_k, rule.top_k), (top_p, rule.top_p), (temperature, rule.temperature))
        )
    cold = temperature <= 0
    top_k, top_p = torch.where(cold, 1, top_k), torch.where(cold, 1.0, top_p)
    values, which = ops.shortlist(logits, rule.global_topk or logits.shape[-1])
    forbidden = values < values.new_full((), LOWEST)  # -inf, which only the host writes; a number here would be float64 in a graph
    place = torch.arange(values.shape[-1], dtype=torch.int32, device=logits.device)
    values = torch.where(place < top_k[:, None], values, MASKED) / torch.where(cold, 1.0, temperature)[:, None]
    reached = ops.cumsum(values.softmax(-1))
    # NxD compares with max(smallest of all rows' sums, top_p). That smallest is some row's first candidate, which is kept anyway.
    kept = (reached <= top_p[:, None]) | (place < rule.top_p_min_tokens)
    p = torch.where(kept | (top_p[:, None] >= 1), values, MASKED).softmax(-1)
    p = torch.where(forbidden, 0.0, p)  # MASKED is drawn where all are: top_k 0 draws evenly of the candidates, but not of those
    reached = ops.cumsum(p)
    reached = reached / reached[:, -1:]
    u = torch.full_like(uniform, 0.5) if rule.deterministic else uniform
    chosen = (u[:, None] > reached[:, :-1]).sum(-1, keepdim=True)
    ids = which.gather(-1, chosen)[:, 0].to(torch.int32)
    return ids, torch.ones_like(ids, dtype=torch.bool)
