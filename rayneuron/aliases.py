"""vLLM's names: what each means here, or why it is refused and what to write instead; one table for command line, files and `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rayneuron.errors import ConfigError
from rayneuron.validation import REFUSED as ANYWHERE
from rayneuron.validation import KeyPath, Locate, dotted, override

# LMI calls dtypes by its `amp` names, transformers and vLLM by torch's: one table, one meaning.
DTYPE_ALIASES = {
    "float32": "fp32", "f32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "half": "fp16",
}  # fmt: skip

# Theirs -> our key, the value as it is.
RENAMED = {
    "tokenizer": "model.tokenizer", "revision": "model.revision", "chat_template": "model.chat_template",
    "skip_tokenizer_init": "model.skip_tokenizer_init", "allow_pickle": "model.allow_pickle",
    "tensor_parallel_size": "tensor_parallel", "pipeline_parallel_size": "pipeline_parallel", "nnodes": "nodes",
    "data_parallel_size": "serving.num_replicas", "max_num_batched_tokens": "prefill_chunk_tokens",
    "override_generation_config": "sampling_defaults", "async_scheduling": "compile.async_mode",
    "enable_log_requests": "serving.log_prompts", "allowed_origins": "serving.allowed_origins",
    "trust_request_chat_template": "serving.trust_request_chat_template", "stream_interval": "serving.stream_interval",
    "default_chat_template_kwargs": "serving.default_chat_template_kwargs",
    "tool_call_parser": "serving.tool_call_parser", "reasoning_parser": "serving.reasoning_parser",
    "enable_lora": "lora.enabled", "lora_modules": "lora.lora_modules", "max_loras": "lora.max_loras",
    "max_lora_rank": "lora.max_lora_rank", "max_cpu_loras": "lora.max_cpu_loras", "lora_target_modules": "lora.target_modules",
    "host": "http_options.host", "port": "http_options.port", "root_path": "http_options.root_path",
    "ssl_keyfile": "http_options.ssl_keyfile", "ssl_certfile": "http_options.ssl_certfile", "ssl_ca_certs": "http_options.ssl_ca_certs",
}  # fmt: skip

# Theirs -> our key and their values -> ours.
TRANSLATED: dict[str, tuple[str, Mapping[Any, Any]]] = {
    "kv_cache_dtype": ("kv_dtype", {"auto": None, "fp8": "f8e4m3", "fp8_e4m3": "f8e4m3", "fp8_e5m2": "f8e5m2"}),
    "scheduling_policy": ("limits.client_priority", {"fcfs": False, "priority": True}),
}

# Theirs -> values that only say how it is here anyway; another one is refused.
GIVEN: dict[str, tuple[Any, ...]] = {
    "enable_auto_tool_choice": (True,), "enable_chunked_prefill": (True,), "disable_log_requests": (True,),
    "enable_prompt_tokens_details": (True,), "max_logprobs": (20,),
    "enable_tokenizer_info_endpoint": (True,), "enable_request_id_headers": (True,), "disable_fastapi_docs": (True,),
    "swap_space": (0,), "cpu_offload_gb": (0,), "tokenizer_mode": ("auto",), "config_format": ("auto", "hf"),
    "model_impl": ("auto", "vllm"), "load_format": ("auto", "safetensors"), "runner": ("auto", "generate", "pooling"),
    "task": ("auto", "generate", "embed"),
    "generation_config": ("auto",), "lora_dtype": ("auto",), "performance_mode": ("balanced",), "enable_log_deltas": (True,),
    "skip_mm_profiling": (True, False), "use_tqdm_on_load": (True, False), "scheduler_reserve_full_isl": (True, False),
    "disable_hybrid_kv_cache_manager": (True, False), "safetensors_load_strategy": ("lazy",), "renderer_num_workers": (1,),
    "distributed_executor_backend": ("ray",), "data_parallel_backend": ("ray",), "response_role": ("assistant",),
    "chat_template_content_format": ("auto",), "api_key": (),
}  # fmt: skip

# Why -> theirs. A switch that says false says how it is here anyway.
_REFUSED: dict[str, tuple[str, ...]] = {
    "every shape is compiled before the first request; leave it out, and name short lists under buckets for a quick start": (
        "enforce_eager", "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "max_seq_len_to_capture",
    ),
    "the KV budget is a number of tokens; write kv_cache_tokens": (
        "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override",
    ),
    "KV and weights stay in the device's memory, a preempted sequence is computed again; leave it out, or write kv_cache_tokens": (
        "swap_space", "cpu_offload_gb", "offload_backend", "kv_offloading_size", "kv_offloading_backend", "preemption_mode",
        "cpu_offload_params", "offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_params",
    ),
    "a prefill is always cut into chunks; write prefill_chunk_tokens for their size": (
        "enable_chunked_prefill", "max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold",
        "num_scheduler_steps", "scheduler_delay_factor", "scheduler_reserve_full_isl", "scheduler_cls",
    ),
    "prefixes are known by their blake2b; leave it out": ("prefix_caching_hash_algo",),
    "adapters are computed in the model's dtype, and cut over ranks as the weights they are added to; leave it out": (
        "lora_dtype", "fully_sharded_loras", "specialize_active_lora",
    ),
    "write speculative_config: {method: ngram, num_speculative_tokens: 8}": (
        "speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min", "speculative_max_model_len",
        "speculative_disable_by_batch_size", "spec_decoding_acceptance_method",
    ),
    "calls are read wherever their form is known (serving.tool_call_parser); leave it out": ("enable_auto_tool_choice",),
    "only the parsers here are read; leave it out": (
        "tool_parser_plugin", "tool_server", "exclude_tools_when_tool_choice_none", "reasoning_parser_plugin", "enable_reasoning",
    ),
    "outputs are constrained wherever rayneuron[structured] is installed, by llguidance; leave it out": (
        "guided_decoding_backend", "structured_outputs_config",
    ),
    "only text goes in and out; leave it out": (
        "limit_mm_per_prompt", "mm_processor_kwargs", "mm_processor_cache_gb", "disable_mm_preprocessor_cache", "allowed_local_media_path",
        "media_io_kwargs", "language_model_only", "mm_encoder_tp_mode", "enable_mm_embeds", "interleave_mm_strings", "enable_prompt_embeds",
        "allowed_media_domains", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_encoder_only", "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin",
        "io_processor_plugin", "skip_mm_profiling", "video_pruning_rate", "mm_tensor_ipc", "default_mm_loras",
        "enable_tower_connector_lora", "disable_chunked_mm_input", "enable_mm_processor_stats", "ec_transfer_config", "ec_manager_config",
    ),
    "models here generate text, and vectors of it; leave it out": ("runner", "task", "convert", "pooler_config", "override_pooler_config"),
    "a model directory is read as config.json, safetensors and tokenizer.json; convert it to that": (
        "load_format", "config_format", "tokenizer_mode", "model_impl", "model_loader_extra_config", "ignore_patterns", "model_weights",
        "safetensors_load_strategy", "pt_load_map_location", "use_tqdm_on_load",
    ),
    "config.json says how a checkpoint is quantised; leave it out, or write quantization: int8 to have it done here": (
        "quantization_config", "allow_deprecated_quantization",
    ),
    "KV of every layer is of kv_dtype, and is the layer's own; leave it out": (
        "kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill", "disable_hybrid_kv_cache_manager",
    ),
    "models with a state instead of KV are not served; leave it out": (
        "mamba_config", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size", "mamba_cache_mode", "mamba_backend",
        "enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds", "gdn_prefill_backend",
    ),
    "a body says how long to think, thinking_token_budget; leave it out, and write serving.reasoning_parser": ("reasoning_config",),
    "write serving.weights_directory, and send POST /admin/weights": ("weight_transfer_config",),
    "write model.skip_tokenizer_init: true": ("tokens_only",),
    "name the file in its place: rayneuron serve FILE.yaml": ("config",),
    "write model.config, the whole config.json inline, or change that file": (
        "hf_overrides", "hf_config_path", "rope_scaling", "rope_theta", "disable_sliding_window",
    ),
    "write model.tokenizer: org/name@revision": ("tokenizer_revision",),
    "set HF_TOKEN in the environment of Ray, on every node": ("hf_token",),
    "models are fetched into the cache of huggingface_hub; set HF_HOME": ("download_dir",),
    "no code is fetched; leave it out": ("code_revision",),
    "write sampling_defaults, which overrides the model's generation_config.json": ("generation_config", "logits_processors"),
    "Ray places the processes; write nodes, tensor_parallel, pipeline_parallel and serving.num_replicas": (
        "distributed_executor_backend", "worker_cls", "worker_extension_cls", "master_addr", "master_port", "node_rank", "headless",
        "data_parallel_backend", "data_parallel_rank", "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port",
        "data_parallel_start_rank", "max_parallel_loading_workers", "api_server_count", "ray_workers_use_nsight", "data_parallel_hybrid_lb",
        "data_parallel_external_lb", "data_parallel_multi_port_external_lb", "data_parallel_supervisor_port",
        "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s", "dp_supervisor_probe_failure_threshold", "renderer_num_workers",
    ),
    "write group.load_s and group.step_s, for which the processes of a model wait": (
        "distributed_timeout_seconds", "cpu_distributed_timeout_seconds",
    ),
    "cores are taken from the ledger of the node; leave it out": ("device_ids", "numa_bind", "numa_bind_nodes", "numa_bind_cpus"),
    "experts are cut over the ranks of tensor_parallel; leave it out": (
        "enable_expert_parallel", "enable_eplb", "eplb_config", "all2all_backend", "moe_backend", "enable_ep_weight_filter",
        "enable_elastic_ep", "expert_placement_strategy", "enable_return_routed_experts",
    ),
    "a context is not cut over ranks; write shard_over_sequence for ranks that share KV heads": (
        "decode_context_parallel_size", "prefill_context_parallel_size", "dcp_comm_backend", "dcp_q_replicate",
        "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size",
    ),
    "it belongs to CUDA; leave it out": (
        "disable_custom_all_reduce", "attention_backend", "attention_config", "kernel_config", "enable_dbo", "calculate_kv_scales",
        "disable_cascade_attn", "enable_flashinfer_autotune", "override_attention_dtype", "enable_sleep_mode", "ir_op_priority",
        "linear_backend", "ubatch_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "disable_nccl_for_dp_synchronization",
        "enable_bf16x3_router_gemm", "enable_layerwise_nvtx_tracing", "cudagraph_metrics", "performance_mode", "profiler_config",
        "fail_on_environ_validation", "enable_flash_late_interaction",
    ),
    "pools of one file hand KV over; write pools: {prefill: {...}}": ("kv_transfer_config",),
    "gateways hear of what is kept by themselves; write kv_events: false where they should not": ("kv_events_config",),
    "write serving.trace: true, and OTEL_EXPORTER_OTLP_ENDPOINT in the environment": ("otlp_traces_endpoint", "collect_detailed_traces"),
    "write compile.optimization, neuronx-cc's -O": ("optimization_level",),
    "write buckets, compile and on_device_sampling, which hold what it says": ("override_neuron_config", "additional_config"),
    "Ray Serve answers HTTP and writes the logs; leave it out": (
        "uds", "middleware", "uvicorn_log_level", "disable_uvicorn_access_log", "allow_credentials", "allowed_methods", "allowed_headers",
        "enable_ssl_refresh", "ssl_cert_reqs", "log_config_file", "max_log_len", "disable_log_requests", "disable_log_stats",
        "enable_log_outputs", "disable_fastapi_docs", "enable_request_id_headers", "enable_tokenizer_info_endpoint",
        "enable_prompt_tokens_details", "enable_server_load_tracking", "enable_force_include_usage", "disable_frontend_multiprocessing",
        "response_role", "chat_template_content_format", "return_tokens_as_token_ids", "logprobs_mode",
        "enable_per_request_metrics", "enable_log_deltas", "log_error_stack", "fingerprint_mode", "fingerprint_value", "ssl_ciphers",
        "disable_access_log_for_endpoints", "h11_max_incomplete_event_size", "h11_max_header_count", "enable_offline_docs", "grpc",
        "cohere_is_reasoning_model", "cohere_format", "aggregate_engine_logging", "show_hidden_metrics_for_version", "kv_cache_metrics",
        "kv_cache_metrics_sample", "enable_mfu_metrics", "enable_logging_iteration_details",
    ),
    "write --grace": ("shutdown_timeout",),
    "a call may ask for 20 logprobs a token; leave it out": ("max_logprobs",),
}  # fmt: skip
REFUSED = {**ANYWHERE, **{name: f"is refused: {why}" for why, names in _REFUSED.items() for name in names}}

# What vLLM says within speculative_config: why it is refused -> theirs.
_DRAFTS: dict[str, tuple[str, ...]] = {
    "write draft_tensor_parallel_size": ("tensor_parallel_size",),
    "write model: org/name@revision": ("revision", "code_revision"),
    "nothing is drafted beyond the positions that config.json gives a draft model; leave it out": ("max_model_len",),
    "as many are tried in a step as pay by measured times; leave it out, and write num_speculative_tokens for the most": (
        "enable_adaptive_verification",
    ),
    "write num_speculative_tokens_per_batch_size: [[9, 256, 0]] for none where more than 8 sequences run": ("disable_by_batch_size",),
    "a draft is accepted if it is the token that comes without drafts, and changes none; leave it out": (
        "rejection_sample_method", "acceptance_method", "draft_sample_method", "posterior_threshold", "posterior_alpha",
        "synthetic_acceptance_rates", "synthetic_acceptance_length", "disable_logprobs",
    ),
    "a row's drafts are one chain, each made behind the one before; leave it out": (
        "speculative_token_tree", "parallel_drafting", "dspark_draft_topk",
    ),
    "a draft is a token of the model too; leave it out, and name a model with the same tokenizer": ("use_heterogeneous_vocab",),
    "it is of method suffix; write method: ngram, which looks up what prompt and output say": (
        "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "what drafts is loaded, compiled and cut as the model is; leave it out": (
        "enforce_eager", "moe_backend", "attention_backend", "kv_cache_dtype", "draft_load_config", "disable_padded_drafter_batch",
        "disable_eagle_block_drop", "use_local_argmax_reduction", "index_share_for_mtp_iteration",
    ),
}  # fmt: skip
DRAFTS = {name: why for why, names in _DRAFTS.items() for name in names}
# Of those, what only says how it is here anyway, beside false and null.
DRAFTS_GIVEN: dict[str, tuple[Any, ...]] = {
    "rejection_sample_method": ("standard", "strict"), "acceptance_method": ("rejection_sampler",), "draft_sample_method": ("greedy",),
    "disable_padded_drafter_batch": (True,), "use_local_argmax_reduction": (True,), "kv_cache_dtype": ("auto",),
}  # fmt: skip


def _drafts(said: Mapping[str, Any]) -> dict[str, Any]:
    """`speculative_config` without those of vLLM's words that say nothing new. Raises ConfigError."""
    for name in DRAFTS.keys() & said.keys():
        if not (said[name] is None or said[name] is False or said[name] in DRAFTS_GIVEN.get(name, ())):
            raise ConfigError(f"speculative_config.{name} is refused: {DRAFTS[name]}", param=f"speculative_config.{name}")
    return {name: value for name, value in said.items() if name not in DRAFTS}


def _names(value: Any) -> dict[str, Any]:
    first, *more = value if isinstance(value, list) and value else [value]
    return {"model.name": first, **({"model.aliases": more} if more else {})}


def _path(value: Any) -> dict[str, Any]:
    return {"model" if isinstance(value, Mapping | None) else "model.path": value}


_SPLIT: dict[str, Callable[[Any], dict[str, Any]]] = {"model": _path, "served_model_name": _names}
NAMES = (*_SPLIT, *RENAMED, *TRANSLATED, *REFUSED)


def means(name: str) -> str | None:
    """Our key, or keys, for one of vLLM's names; None for one that is refused."""
    if name in _SPLIT:
        return " and ".join(_SPLIT[name](["a", "b"] if name == "served_model_name" else ""))
    return RENAMED.get(name) or (TRANSLATED[name][0] if name in TRANSLATED else None)


def meaning(name: str, value: Any) -> dict[str, Any]:
    """What one of vLLM's names with this value says here: {our dotted key: value}. Raises ConfigError with the reason and what to write."""
    if name in _SPLIT:
        return _SPLIT[name](value)
    if name in RENAMED:
        return {RENAMED[name]: value}
    if name in TRANSLATED:
        key, values = TRANSLATED[name]
        return {key: values.get(value, value) if isinstance(value, str) else value}
    if value is None:  # as vLLM prints what was not said
        return {}
    if any(value == given and isinstance(value, bool) == isinstance(given, bool) for given in GIVEN.get(name, (False,))):
        return {}
    raise ConfigError(f"{name} {REFUSED[name]}", param=name)


def translate(args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """`args` of a deployment with vLLM's names said as ours, and which name each of those keys had. Raises ConfigError."""
    theirs = [name for name in NAMES if name in args and not (name == "model" and isinstance(args[name], Mapping | None))]
    said: dict[str, Any] = {name: value for name, value in args.items() if name not in theirs}
    if isinstance(drafts := said.get("speculative_config"), Mapping):
        said["speculative_config"] = _drafts(drafts)
    spelled: dict[str, str] = {}
    for name in theirs:
        for key, value in meaning(name, args[name]).items():
            if key.startswith("http_options."):
                raise ConfigError(f"{name} belongs to the whole file; write {key}, beside applications", param=name)
            if key in spelled or _holds(said, key):
                raise ConfigError(f"{name} and {spelled.get(key, key)} say the same; leave one of them out", param=name)
            said = override(said, {key: value})
            spelled[key] = name
    return said, spelled


def translated(args: object, place: Locate) -> tuple[object, Locate]:
    """`args` as `translate` has them, and `place` for their keys, which says the name that was written. Raises ConfigError."""
    if not isinstance(args, Mapping):
        return args, place
    try:
        said, spelled = translate(args)
    except ConfigError as wrong:
        path = tuple(wrong.param.split(".")) if wrong.param else ()
        raise ConfigError(place(path, wrong.message) + wrong.message, param=wrong.param) from None

    def placed(keys: KeyPath, text: str) -> str:
        theirs = spelled.get(dotted(keys))
        return place((theirs,), text) + f"{theirs}: " if theirs else place(keys, text)

    return said, placed


def _holds(args: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        if not isinstance(args, Mapping) or part not in args:
            return False
        args = args[part]
    return True
