"""Words that several of the systems have, and what is said of them."""

from __future__ import annotations

from typing import Any, Final

from rayneuron.aliases import DTYPE_ALIASES
from rayneuron.options.words import Args, Said, Word, among, flag, numbers, positive, whole

OFF: Final[tuple[Any, ...]] = (False, 0, None, "", "false", "False", "0", "None")
dtype = among({**{name: name for name in ("auto", "fp32", "fp16", "bf16")}, **DTYPE_ALIASES})
reduced = among({"float32": "fp32", "f32": "fp32", "bfloat16": "bf16", "bf16": "bf16"})

ADAPTERS = "write lora: {lora_modules: {name: PEFT directory}}, and on device cpu lora.directory for adapters that come later"
GRAPHS = "how a graph is laid out is the compiler's to say, the text is the same"
OWN_SHARDS = "write model.path: a folder that `rayneuron shard` wrote"
OWN_GRAPHS = "graphs are compiled ahead by `rayneuron compile --out DIR`; write compile.artifact: DIR"
LAYOUT = Word(note=GRAPHS)
BY_ITSELF = "it is so here, or decides itself"


def int8(value: Any, args: Args) -> Any:
    """Weights of eight bits, or as they are."""
    return "int8" if flag(value) else None


def sizes(key: str, most: str) -> Any:
    """One length, or a list of buckets whose last it is."""

    def read(value: Any, args: Args) -> Any:
        lengths = numbers(value)
        return lengths[-1] if len(lengths) == 1 else Said({most: lengths[-1], key: lengths})

    return read


COMMON: Final[dict[str, Word]] = {
    "n_positions": Word("max_model_len", sizes("buckets.token_generation", "max_model_len"), ("None", None), there="at most 4096"),
    "context_length_estimate": Word("buckets.context_encoding", numbers, ("None", None), there="powers of two from 128"),
    "unroll": Word(note="layers are unrolled where that pays"),
    "group_query_attention": Word(
        "group_query_attention",
        among({name: name for name in ("shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads")}),
        ("None", None),
        there="by the number of heads",
    ),
    "low_cpu_mem_usage": Word(note="tensors are read one by one, only the rank's part of each"),
    "on_device_embedding": Word(note="the embedding is on the device"),
    "fuse_qkv": Word("fused_qkv", flag, ("None", None), there="false"),
    "fuse_mlp": Word(note="gate and up are multiplied as one matrix with fused_qkv"),
    "fused_rmsnorm_qkv": LAYOUT,
    "qkv_tiling": LAYOUT,
    "weight_tiling": LAYOUT,
    "mlp_out_weight_transpose": LAYOUT,
    "attention_layout": LAYOUT,
    "collectives_layout": LAYOUT,
    "cache_layout": LAYOUT,
    "all_reduce_dtype": Word("compile.reduce_dtype", reduced, ("None", None), there="the compute dtype"),
    "cast_logits_dtype": Word(refused="logits are float32; leave it out", same=("float32", "None", None)),
    "sequence_parallel_norm_threshold": Word("sequence_parallel", positive, ("None", None), note="every prefill is split, however short"),
    "shard_over_sequence": Word("shard_over_sequence", flag, ("None", None), there="false"),
    "sequence_parallel": Word("sequence_parallel", flag, ("None", None), there="false"),
    "neuron_cc_pipeline_factor": Word("compile.tiling", whole, ("None", None), there="2"),
    "compilation_worker_count": Word("compile.workers", whole, ("None", None)),
}
