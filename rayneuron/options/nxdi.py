"""NxD Inference's names: NeuronConfig and what derives from it, as neuron_config.json and override_neuron_config hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rayneuron.errors import ConfigError
from rayneuron.options import adapters, drafts
from rayneuron.options.shared import GRAPHS, LAYOUT, OFF, OWN_SHARDS, dtype, reduced
from rayneuron.options.words import Args, Said, Table, Translation, Word, flag, literal, numbers, tell, whole


def _sampling(value: Any, args: Args) -> Said:
    """OnDeviceSamplingConfig, as an object or as the mapping it is written as."""
    config = dict(value) if isinstance(value, Mapping) else dict(vars(value))
    said, told = Said({"on_device_sampling.neuron_compat": True}), Translation()
    tell(told, SAMPLING, config, lambda name: f"on_device_sampling_config.{name}", "OnDeviceSamplingConfig")
    if config.get("do_sample") is False:
        said["sampling_defaults.temperature"] = 0.0
    return Said({**told.assigned, **said})


def _quantized(value: Any, args: Args) -> Any:
    return str(literal(args.get("quantization_dtype") or "int8")).removeprefix("torch.") if flag(value) else None


def _cache(value: Any, args: Args) -> Any:
    return "f8e4m3" if flag(value) else None


def _blocks(value: Any, args: Args) -> int:
    return whole(value) * whole(args.get("pa_block_size", 32))


def overrides(value: Any, args: Args) -> Said:
    """`override_neuron_config`: a mapping, or the text of one."""
    config = literal(value)
    if not isinstance(config, Mapping):
        raise ValueError(f"must be a mapping of NeuronConfig's names, got {value!r}")
    told = Translation()
    tell(told, NEURON_CONFIG, config, lambda name: f"override_neuron_config.{name}", "NeuronConfig")
    return Said(told.assigned)


SAMPLING: Final[Table] = {
    "do_sample": Word(note="each request says its own"),
    "top_k": Word("sampling_defaults.top_k", whole, there="1"),
    "top_p": Word("sampling_defaults.top_p", lambda v, a: float(v)),
    "temperature": Word("sampling_defaults.temperature", lambda v, a: float(v)),
    "dynamic": Word(note="each request has its own parameters"),
    "deterministic": Word("on_device_sampling.deterministic", flag, there="false"),
    "global_topk": Word("on_device_sampling.global_topk", whole, there="256"),
    "top_p_min_tokens": Word("on_device_sampling.top_p_min_tokens", whole, there="1"),
}
NEURON_CONFIG: Final[Table] = {
    "batch_size": Word("max_num_seqs", whole, there="1"),
    "max_batch_size": Word("max_num_seqs", whole, there="batch_size"),
    "tkg_batch_size": Word("max_num_seqs", whole, there="batch_size"),
    "ctx_batch_size": Word(note="prefills of several prompts share a step where they fit"),
    "padding_side": Word(refused="rows are padded at the right; leave it out", same=("right",), there="right"),
    "seq_len": Word("max_model_len", whole, there="128"),
    "max_length": Word("max_model_len", whole, there="seq_len"),
    "n_positions": Word("max_model_len", whole, there="seq_len"),
    "max_context_length": Word(note="a prompt may be as long as max_model_len", there="seq_len"),
    "n_active_tokens": Word(note="a step's tokens are those of its shape", there="seq_len"),
    "max_new_tokens": Word("sampling_defaults.max_tokens", whole, (None,), there="seq_len - max_context_length"),
    "torch_dtype": Word("dtype", dtype, there="bfloat16"),
    "rpl_reduce_dtype": Word("compile.reduce_dtype", reduced, (None,), there="torch_dtype"),
    "async_mode": Word("compile.async_mode", flag, there="false"),
    "save_sharded_checkpoint": Word(note="`rayneuron shard` writes one"),
    "logical_neuron_cores": Word(note="cores are counted as the machine, or `instance`, says", there="1"),
    "logical_nc_config": Word(note="cores are counted as the machine, or `instance`, says", there="1"),
    "weights_to_skip_layout_optimization": LAYOUT,
    "tp_degree": Word("tensor_parallel", whole, there="1"),
    "pp_degree": Word("pipeline_parallel", whole, there="1"),
    "flash_decoding_enabled": Word("shard_over_sequence", flag, there="false"),
    "fused_qkv": Word("fused_qkv", flag, there="false"),
    "sequence_parallel_enabled": Word("sequence_parallel", flag, there="false"),
    "qk_layernorm": Word(note="the model's config.json says it", there="false"),
    "on_device_sampling_config": Word("on_device_sampling.neuron_compat", _sampling, (None,), there="on the host"),
    "enable_bucketing": Word(note="shapes are listed under buckets, or powers of two", there="false"),
    "context_encoding_buckets": Word("buckets.context_encoding", numbers, (None,), there="powers of two from 128"),
    "token_generation_buckets": Word("buckets.token_generation", numbers, (None,), there="powers of two from 128"),
    "prefix_buckets": Word("buckets.prefix", numbers, (None,)),
    "quantized": Word("quantization", _quantized, there="false"),
    "quantization_dtype": Word(note="it counts with quantized: true", there="int8"),
    "quantization_type": Word(note="scales are a channel's", there="per_tensor_symmetric"),
    "quantized_checkpoints_path": Word(note="weights are quantised as they are read; or write model.path: what `rayneuron quantize` wrote"),
    "kv_cache_quant": Word("kv_dtype", _cache, there="false"),
    **{name: Word(note=GRAPHS, there="false") for name in ("attn_kernel_enabled", "qkv_kernel_enabled", "mlp_kernel_enabled")},
    **{name: Word(note=GRAPHS, there="false") for name in ("quantized_mlp_kernel_enabled", "rmsnorm_quantize_kernel_enabled")},
    "is_continuous_batching": Word(note="requests are batched continuously", there="false"),
    "cc_pipeline_tiling_factor": Word("compile.tiling", whole, there="2"),
    "capacity_factor": Word("capacity_factor", lambda v, a: float(v), (None,), there="no token dropped"),
    "glu_mlp": Word(note="the family says it"),
    "is_prefix_caching": Word("enable_prefix_caching", flag, there="false"),
    "is_block_kv_layout": Word(note="block_size says it"),
    "pa_block_size": Word("block_size", whole, there="32"),
    "pa_num_blocks": Word("kv_cache_tokens", _blocks),
    "lora_config": Word(adapters.MODULES, adapters.serving, OFF, note="its words are LoraServingConfig's"),
    **drafts.NXDI,
}


def told(config: Mapping[str, Any], where: str) -> Translation:
    """A `neuron_config.json`. Raises ConfigError."""
    inner = config.get("neuron_config", config)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{where}: neuron_config must be a mapping of NeuronConfig's names; {OWN_SHARDS}")
    beside = {name: config[name] for name in ("fused_spec_config",) if config.get(name)}
    out = Translation()
    tell(out, NEURON_CONFIG, {**inner, **beside}, lambda name: f"{where}: neuron_config.{name}", "NeuronConfig")
    if isinstance(config.get("_name_or_path"), str) and config["_name_or_path"]:
        out.say("model.path", config["_name_or_path"], f"{where}: _name_or_path")
    return out
