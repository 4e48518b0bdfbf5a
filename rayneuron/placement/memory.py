"""Memory of one rank: weights, KV, bucket scratch. By arithmetic on config.json, without torch, so that planning takes no time.

B rows, T new tokens, L attended, H heads, D head size, E hidden, F inner size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rayneuron import models
from rayneuron.config import Deployment
from rayneuron.devices.neuron.targets import spare_columns, targets
from rayneuron.engine.buckets import Capacity, inventory, prefill_sizes
from rayneuron.models import shard, words
from rayneuron.models.adaptable import modules_of
from rayneuron.models.arch import Arch
from rayneuron.models.memory import adapter_columns, kv_shape, parameters, share

MIB = 2**20
# What the runtime keeps on each core beside tensors, where no graphs are loaded; and where they are: microcode, shared scratchpad and
# collectives, and for each graph of LAYERS layers its code and DMA rings. From the one core somebody published, which ran out of memory
# (transformers-neuronx #92, Llama 3 70B over 12 cores of Inf2, by the sample it names 5 decode and 5 context graphs at most): 96 MB
# microcode (device-memory document), 512 scratchpad, 367 collectives; 386 code and 1,471 rings, so 186 MB a graph or more. Whether that
# goes by layers, and what it is elsewhere, is a guess: step 21 of `rayneuron neuron-check --model M` says both figures of a real core.
RUNTIME_BYTES, SHARED_BYTES = 512 * MIB, 1024 * MIB
MICROCODE_BYTES, GRAPH_BYTES, LAYERS = 96 * MIB, 192 * MIB, 80
_SMALL = 1  # int8, f8e4m3, f8e5m2


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes one core holds. `scratch`: the largest step's activations; `runtime`: a reserve, `code` of it for the graphs; `adapters`: the
    room for them that is part of the weights."""

    weights: int
    kv: int
    scratch: int
    runtime: int = RUNTIME_BYTES
    code: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.scratch + self.runtime


def arch_of(config: Deployment, raw: Mapping[str, Any], ranks: int) -> Arch:
    """The Arch as this deployment shards it. Raises CheckpointError naming what config.json lacks."""
    arch = replace(models.architecture(dict(raw)), gqa=config.group_query_attention)
    if config.shard_over_sequence and ranks > 1:
        return replace(arch, sequence_shards=shard.sequence_shards(arch.heads, arch.kv_heads, ranks))
    return arch


def memory(
    config: Deployment, raw: Mapping[str, Any], capacity: Capacity, ranks: int, layers: range, *, first: bool = True, last: bool = True
) -> Memory:
    """What one rank of one stage holds. The weights and KV are exact, the scratch an upper bound for plain (unfused) attention."""
    arch, width = arch_of(config, raw, ranks), words.WIDTHS[words.compute(config.dtype, raw)]
    held = parameters(arch, models.family(dict(raw)), ranks, layers, first=first, last=last)
    quantised = config.quantization is not None or words.stored(raw) is not None
    products = held.products * _SMALL + 4 * held.channels if quantised else held.products * width
    weights = products + held.others * width + 4 * held.wide
    shape = kv_shape(arch, capacity.space, ranks, len(layers))
    kv, code = shape.elements, 0
    if config.few_graphs:
        kv += kv // shape.columns * spare_columns(capacity.space)
        code = len(targets(inventory(capacity), capacity.space)) * GRAPH_BYTES * len(layers) // LAYERS
        if arch.tied and first and last:  # a graph has it under two names
            weights += share(arch, ranks).count(["head.w"]).others * width
    adapters = _adapters(config, raw, arch, ranks, layers) * width
    reserve = SHARED_BYTES + code if config.few_graphs else RUNTIME_BYTES
    scratch = _scratch(arch, capacity, ranks, width, last)
    return Memory(weights + adapters, kv * (_SMALL if config.kv_dtype else width), scratch, reserve, code, adapters)


def _adapters(config: Deployment, raw: Mapping[str, Any], arch: Arch, ranks: int, layers: range) -> int:
    """Numbers in the tables of all slots: ranks share B where they share a product's outputs, and A where they share its inputs; the other
    each has whole."""
    if config.lora is None or not config.few_graphs:
        return 0
    modules = modules_of(arch, models.family(dict(raw)), config.lora.target_modules)
    return config.lora.slots(resident=True) * config.lora.max_lora_rank * adapter_columns(arch, modules, ranks, layers)


def passes(c: Capacity, layers: int) -> int:
    """Bytes of code, as guessed for graphs, of the `layers` that make the drafts of those that verify them, one after the other."""
    return sum(shape.tag == "verify" for shape in inventory(c)) * (c.verify - 1) * GRAPH_BYTES * layers // LAYERS


def _scratch(arch: Arch, c: Capacity, ranks: int, width: int, last: bool) -> int:
    plan = share(arch, ranks).plan
    inner = -(-max(arch.ffn, arch.dense_ffn) // ranks)
    most = 0
    for rows, tokens in [*prefill_sizes(c), *((b, max(c.verify, 1)) for b in c.batch)]:
        new = rows * tokens
        attention = new * (plan.q_heads + 2 * plan.kv_heads) * arch.head_dim * width + new * plan.q_heads * c.length * 4
        step = 3 * new * arch.hidden * width + max(attention, 3 * new * inner * width)
        every = tokens == c.verify or (rows == 1 and tokens <= c.scores)  # for drafts, and for prompt logprobs
        logits = 4 * arch.vocab * (new if every else rows) if last else 0
        most = max(most, step + logits)
    return most


def float8(config: Deployment, raw: Mapping[str, Any]) -> bool:
    """Whether weights or KV are float8: the deployment says so, or the checkpoint itself."""
    said = (config.quantization, config.kv_dtype, (raw.get("quantization_config") or {}).get("dtype"))
    return any(str(word).startswith(("f8", "float8", "torch.float8")) for word in said)
