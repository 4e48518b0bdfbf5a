"""What steps would take on a device that nobody has measured: a guess from its published rates, held to AWS's own tables.

Decode reads the weights and the KV once; prefill is products at a sixth of the peak; each layer has two sums over the ranks, whose latency
is most of a small step. The figures that are of no data sheet are fitted to what the Neuron documentation says of Llama 3 on Inf2 and Trn1
(TP over all cores; a test says how closely). Trn2, other models and smaller degrees go by the same rule, unproven.

B rows, T new tokens, L attended positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rayneuron.config import Deployment
from rayneuron.engine.buckets import Capacity
from rayneuron.models import family
from rayneuron.models.memory import parameters
from rayneuron.placement.instances import Instance
from rayneuron.placement.memory import arch_of, memory
from rayneuron.types import Profile

_SUM_MS = 0.078  # of a sum over the ranks, of which a layer has two
_OF_PEAK = 0.175  # of the products' rate in a prefill
_OF_KV = 0.5  # of the memory's rate where KV is read
_ROW_MS = 0.1  # of a row more in a step, its sums and its choice of a token
_FIXED_MS = 0.3


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Of one device: bytes a second of its memory, and bf16 products a second (both of the Neuron architecture pages)."""

    memory: float
    products: float


RATES: Mapping[str, DeviceRates] = MappingProxyType(
    {"inf2": DeviceRates(820e9, 190e12), "trn1": DeviceRates(820e9, 190e12), "trn2": DeviceRates(2.9e12, 667e12)}
)


def guessed(config: Deployment, raw: Mapping[str, Any], c: Capacity, instance: Instance) -> Profile:
    """The profile of an engine of `config.tensor_parallel` cores of such an instance. Raises ConfigError where they cannot share it."""
    ranks, rates = config.tensor_parallel, RATES[instance.family]
    share = ranks / (instance.cores / instance.devices)  # devices of the group
    arch = arch_of(config, raw, ranks)
    held = memory(config, raw, c, ranks, range(arch.layers))
    rank = parameters(arch, family(dict(raw)), ranks)
    active = rank.products + rank.others
    if arch.experts:
        active = active * arch.top_k // arch.experts  # as if all of it were experts
    sums_ms = 2 * arch.layers * _SUM_MS if ranks > 1 else 0.0
    rate = rates.memory * share / ranks  # of a rank
    weights_ms = 1e3 * held.weights / rate
    kv_ms = 1e3 * held.kv / (c.blocks * c.block) / (rate * _OF_KV)  # a position

    def decode_ms(rows: int, length: int) -> float:
        return _FIXED_MS + sums_ms + weights_ms + (rows - 1) * _ROW_MS + rows * length * kv_ms

    def prefill_ms(tokens: int, length: int) -> float:
        attention = 4 * arch.layers * arch.heads * arch.head_dim * length / 2 / ranks
        products = tokens * (2 * active + attention) / (rates.products * share / ranks * _OF_PEAK)
        return _FIXED_MS + sums_ms + weights_ms + 1e3 * products + length * kv_ms

    decode = tuple((b, n, decode_ms(b, n)) for b in c.batch for n in c.lengths)
    prefill = tuple((1, t, n, prefill_ms(t, n)) for t in c.context for n in c.lengths)
    return Profile(
        batch=c.batch, lengths=c.lengths, context=c.context, prefix=c.prefix, chunk=c.chunk, decode=decode, prefill=prefill,
        tokens=((1, decode_ms(1, c.lengths[0])),), chunk_ms=config.prefill_chunk_ms or 0.0,
    )  # fmt: skip
