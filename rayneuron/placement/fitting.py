"""Does a model fit the cores it asks for, and if not, the smallest change of one setting that makes it fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rayneuron import models
from rayneuron.config import Deployment
from rayneuron.config_features import SpeculativeConfig, undrafted
from rayneuron.devices.base import LIKELIEST, LOGITS, POOLED, SAMPLED, SCORES
from rayneuron.devices.neuron.targets import MOST_GRAPHS, Target, spare_columns, targets
from rayneuron.engine.buckets import SMALLEST_PREFIXED, Capacity, capacity, inventory, prefixes, smaller
from rayneuron.errors import ConfigError
from rayneuron.models import words
from rayneuron.models.heads import Heads
from rayneuron.models.memory import kv_shape
from rayneuron.placement.instances import INSTANCES, MACHINE, Instance
from rayneuron.placement.layout import Layout, partition
from rayneuron.placement.memory import Memory, memory, passes

# Of a host: Python, torch and the SDK a worker; the system and Ray a node. Inferred, not measured.
WORKER_BYTES, NODE_BYTES = 2**30, 2**30
DEFAULT_MODEL_LEN = 4096  # where the configuration names none and the model could do more: LMI's and vLLM-neuron's choice


@dataclass(frozen=True, slots=True)
class Wanted:
    """One application: its checked configuration, the model's config.json, how many ranks its device drives from one process, and what
    drafts: the config.json of a draft model, where that is another's, or heads."""

    config: Deployment
    raw: Mapping[str, Any]
    ranks_per_process: int = 1
    draft: Mapping[str, Any] | Heads | None = None

    @property
    def replicas(self) -> int:
        """The most replicas it may ever have: what an autoscaler may take is reserved."""
        return self.config.serving.most_replicas


class Held(Protocol):
    """A worker as a plan places it: its cores and what each holds."""

    @property
    def cores(self) -> tuple[int, ...]: ...
    @property
    def memory(self) -> Memory: ...


def model_length(config: Deployment, raw: Mapping[str, Any]) -> int:
    """max_model_len, or the model's own up to DEFAULT_MODEL_LEN, since a longer one costs memory and start-up time."""
    return config.max_model_len or min(own_length(raw), DEFAULT_MODEL_LEN)


def own_length(raw: Mapping[str, Any]) -> int:
    """The positions that a config.json gives a model."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return int(next((raw[name] for name in names if raw.get(name)), DEFAULT_MODEL_LEN))


def capacity_of(config: Deployment, raw: Mapping[str, Any]) -> Capacity:
    """Rows, lengths and bucket lists the engine will have."""
    length = model_length(config, raw)
    prefix, few = prefixes(config.buckets.prefix, length), config.few_graphs
    scores = not few if config.buckets.scores is None else config.buckets.scores
    embeddings = not few if config.buckets.embeddings is None else config.buckets.embeddings
    return capacity(
        rows=config.max_num_seqs,
        length=length,
        prefix=prefix,
        smallest_context=SMALLEST_PREFIXED if prefix else None,
        chunk=config.prefill_chunk_tokens,
        kv_tokens=config.kv_cache_tokens,
        block=config.kv_block(length),
        batch=config.buckets.batch,
        context=config.buckets.context_encoding,
        lengths=config.buckets.token_generation,
        smallest=config.buckets.smallest,
        few=few,
        wants=[*([LOGITS] if few else [LIKELIEST, SAMPLED, LOGITS]), *([SCORES] if scores else []), *([POOLED] if embeddings else [])],
        verify=1 + said.num_speculative_tokens if (said := drafting(config, raw)) else 0,
        drafts="" if said is None else said.within,
    )


def drafting(config: Deployment, raw: Mapping[str, Any]) -> SpeculativeConfig | None:
    """How tokens are drafted: as the deployment says; where it does not say, by looking them up wherever no bit of a token hangs on how
    many share its step, that is where layers run in the device's fused form. Never more than a sequence has room for."""
    said, most = _drafting(config, raw), model_length(config, raw) - 1
    if said is None or said.num_speculative_tokens <= most:
        return said
    return said.model_copy(update={"num_speculative_tokens": most}) if most else None


def _drafting(config: Deployment, raw: Mapping[str, Any]) -> SpeculativeConfig | None:
    if "speculative_config" in config.model_fields_set or config.few_graphs:
        return config.speculative_config
    arch = models.architecture(dict(raw))
    apart = config.kv_dtype is not None or config.shard_over_sequence or arch.uncommon or arch.head_dim % 2
    if apart or undrafted(config) is not None or words.compute(config.dtype, raw) == "fp16":
        return None
    return SpeculativeConfig.model_construct()


def graphs_of(config: Deployment, c: Capacity) -> Sequence[Target]:
    """The graphs of one stage. Raises ConfigError where nobody asked for so many."""
    if not config.few_graphs:
        return inventory(c)
    made = targets(inventory(c), c.space)
    if len(made) > MOST_GRAPHS and not config.buckets.model_fields_set:
        raise ConfigError(
            f"{len(made)} graphs would be compiled, each minutes of neuronx-cc and memory of every core; more than {MOST_GRAPHS} must be "
            f"asked for: write buckets: {{context_encoding: {list(c.context[-2:])}, token_generation: {list(c.lengths[-2:])}}}",
            param="buckets",
        )
    return made


def stage_memory(want: Wanted, c: Capacity, tensor_parallel: int, pipeline_parallel: int) -> list[Memory]:
    """What a core of each stage holds. Raises ConfigError where the model cannot be divided so."""
    parts = partition(models.architecture(dict(want.raw)).layers, pipeline_parallel)
    held = [memory(want.config, want.raw, c, tensor_parallel, part, first=i == 0, last=i == len(parts) - 1) for i, part in enumerate(parts)]
    if isinstance(want.draft, Heads):
        width = words.WIDTHS[words.compute(want.config.dtype, want.raw)]
        return [_with(one, _beside(want.draft, c, tensor_parallel, width, want.config.few_graphs)) for one in held]
    if (said := want.config.speculative_config) is None or not said.by_model:
        return held
    raw = want.raw if want.draft is None else want.draft
    own = {"dtype": said.dtype, "quantization": said.quantization, "kv_dtype": None, "group_query_attention": None, "lora": None}
    layers = range(models.architecture(dict(raw)).layers)
    more = memory(want.config.model_copy(update=own), raw, c, tensor_parallel, layers)  # beside the one stage there is
    return [_with(one, replace(more, code=passes(c, len(layers)) if more.code else 0)) for one in held]


def _with(one: Memory, more: Memory) -> Memory:
    """A rank's memory with what drafts beside the model, one of which is at work at a time."""
    return replace(
        one, weights=one.weights + more.weights, kv=one.kv + more.kv, scratch=max(one.scratch, more.scratch),
        runtime=one.runtime + more.code, code=one.code + more.code,
    )  # fmt: skip


def _beside(heads: Heads, c: Capacity, ranks: int, width: int, few: bool) -> Memory:
    """What heads hold of a rank: their weights, and what they keep of every position; `few` graphs have spare ones."""
    held, space = heads.parameters(ranks), c.space
    shape = kv_shape(heads.arch, space, ranks, heads.layers)
    kept = (shape.elements // space.block + space.total * heads.width) * (space.block + (spare_columns(space) if few else 0))
    weights = (held.products + held.others) * width + 4 * heads.arch.spoken
    return Memory(weights, kept * width, 0, code=passes(c, heads.layers) if few else 0)


def check_memory(want: Wanted, made: Layout, c: Capacity, instance: Instance) -> list[Memory]:
    """`stage_memory`, refused with what would fit where a core has less. Raises ConfigError."""
    held = stage_memory(want, c, made.tensor_parallel, made.pipeline_parallel)
    worst = max(held, key=lambda m: m.total)
    if worst.total <= instance.core_memory_bytes:
        return held
    raise ConfigError(
        f"needs {gib(worst.total)} GiB a {'core' if instance.name != MACHINE else 'rank'} ({parts(worst)}), "
        f"{instance.name} has {gib(instance.core_memory_bytes)}; " + _what_fits(want, made, c, instance)
    )


def check_together(held: Sequence[Memory], memory_bytes: int) -> None:
    """Refuse ranks that share one memory and need more than it has. Raises ConfigError."""
    total = sum(one.total for one in held)
    if total > memory_bytes:
        raise ConfigError(
            f"all {len(held)} ranks together need {gib(total)} GiB, this machine has {gib(memory_bytes)}; write a smaller max_num_seqs or "
            "max_model_len, quantization: int8, or fewer replicas"
        )


def host_memory(places: Sequence[Held]) -> int:
    """Bytes of a node's own memory while all of its workers load: each holds its ranks' weights until they are on the devices."""
    return NODE_BYTES + sum(WORKER_BYTES + place.memory.weights * len(place.cores) for place in places) if places else 0


def check_host(needed: int, quantized: int, instance: Instance) -> None:
    """Refuse weights that do not pass through a node's own memory. `quantized`: bytes needed with int8 weights. Raises ConfigError.

    A type that merely declares cores says nothing of its memory.
    """
    if not 0 < instance.host_memory_bytes < needed:
        return
    larger = [
        i.name for i in INSTANCES.values()
        if i.family == instance.family and i.cores >= instance.cores and i.host_memory_bytes >= needed
    ]  # fmt: skip
    fits = [f"instance: {larger[0]}"] if larger else []
    fits += ["quantization: int8"] if quantized <= instance.host_memory_bytes else []
    raise ConfigError(
        f"while weights go to the devices, a node's own memory holds them: {gib(needed)} GiB (the weights of all ranks of a node, "
        f"{gib(WORKER_BYTES)} a process, {gib(NODE_BYTES)} for the system and Ray), {instance.name} has {gib(instance.host_memory_bytes)}; "
        f"write {', or '.join(fits) or 'fewer models or replicas, or nodes: N'}",
        param="instance",
    )


def _what_fits(want: Wanted, made: Layout, c: Capacity, instance: Instance) -> str:
    def fits(c: Capacity, tensor_parallel: int = made.tensor_parallel, **settings: Any) -> bool:
        changed = replace(want, config=want.config.model_copy(update=settings))
        try:
            held = stage_memory(changed, c, tensor_parallel, made.pipeline_parallel)
        except ConfigError:
            return False
        return max(m.total for m in held) <= instance.core_memory_bytes

    found: list[str] = []
    if made.nodes_per_stage == 1:
        found += [f"tensor_parallel: {d}" for d in instance.degrees if d > made.tensor_parallel and fits(c, d)][:1]
    fewer = (smaller(c, rows=rows, batch=tuple(b for b in c.batch if b <= rows)) for rows in range(c.rows - 1, 0, -1))
    found += [f"max_num_seqs: {less.rows}" for less in fewer if fits(less)][:1]
    shorter = (smaller(c, length=n, context=tuple(t for t in c.context if t <= n) or (n,)) for n in reversed(c.lengths) if n < c.length)
    found += [f"max_model_len: {less.length}" for less in shorter if fits(less)][:1]
    if want.config.quantization is None and fits(c, quantization="int8"):
        found.append("quantization: int8")
    if (lora := want.config.lora) is not None and want.config.few_graphs:
        fewer_slots = (lora.model_copy(update={"max_loras": n}) for n in range(lora.slots(resident=True) - 1, 0, -1))
        found += [f"lora.max_loras: {less.max_loras}" for less in fewer_slots if fits(c, lora=less)][:1]
    return (
        "write " + ", or ".join(found)
        if found
        else f"no one setting makes it fit {instance.name}; write nodes: N with pipeline_parallel: N"
    )


def gib(size: int) -> str:
    """Bytes in GiB, two places."""
    return f"{size / 2**30:.2f}"


def parts(m: Memory) -> str:
    """The summands of a core's memory, for people."""
    adapters = f" + adapters {gib(m.adapters)}" if m.adapters else ""
    told = f"weights {gib(m.weights - m.adapters)}{adapters} + KV {gib(m.kv)} + buckets {gib(m.scratch)} + runtime {gib(m.runtime)}"
    rest = f"{gib(m.runtime - m.code)} scratchpad and collectives, {gib(m.code)} code and DMA rings of the graphs"
    return f"{told} (a guess: {rest})" if m.code else told
