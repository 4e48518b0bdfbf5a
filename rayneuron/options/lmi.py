"""DJL LMI's names: serving.properties (option.NAME and bare server keys) and the environment of its container."""

from __future__ import annotations

from typing import Any, Final

from rayneuron import aliases
from rayneuron.options import adapters, drafts
from rayneuron.options.nxdi import overrides
from rayneuron.options.shared import BY_ITSELF, COMMON, OFF, OWN_GRAPHS, OWN_SHARDS, dtype, int8
from rayneuron.options.words import Args, Said, Table, Word, among, flag, literal, seconds, whole

HANDLERS = ("djl_python.transformers_neuronx", "djl_python.huggingface", "djl_python.neuron_vllm", "djl_python.lmi_vllm.vllm_async_service")


def _quantization(value: Any, args: Args) -> Any:
    return among({"static_int8": "int8", "int8": "int8", "f8e4m3": "f8e4m3", "f8e5m2": "f8e5m2"})(value, args)


def _degree(value: Any, args: Args) -> int:
    if str(value).strip() == "max":
        raise ValueError("max is not known before the machine is; write the number of cores: 2 on inf2.xlarge, 32 on trn1.32xlarge")
    return whole(value)


def _saturate(value: Any, args: Args) -> str:
    return "--enable-saturate-infinity" if flag(value) else ""


def _vllm(name: str) -> Word:
    """A name of vLLM's that LMI passes on, or renames by a dash at most."""

    def read(value: Any, args: Args) -> Said:
        return Said(aliases.meaning(name, literal(value)))

    ours = aliases.means(name)
    if ours:
        return Word(ours, read)
    return Word(refused=aliases.REFUSED[name].removeprefix("is refused: "), same=OFF + aliases.GIVEN.get(name, ()))


_STREAMS = "each request says whether it is streamed"
_RESTARTS = "Ray Serve replaces what fails; leave it out"
_LMI: Final[dict[str, Word]] = {
    "model_id": Word("model.path", there="the folder itself"),
    "model_dir": Word("model.path", there="the folder itself"),
    "revision": Word("model.revision"),
    "entryPoint": Word(refused="handlers of your own are not run; leave it out", same=HANDLERS),
    "rolling_batch": Word(refused="requests are batched continuously; write auto", same=("auto", "tnx", "vllm"), there="auto"),
    "rolling_batch_strategy": Word(refused="requests are batched continuously; leave it out", same=("continuous_batching",)),
    "tensor_parallel_degree": Word("tensor_parallel", _degree, there="1; max in the container"),
    "pipeline_parallel_degree": Word("pipeline_parallel", whole, there="1; more is refused on Neuron"),
    "cluster_size": Word("nodes", whole, there="1"),
    "batch_size": Word(refused="requests are batched continuously; write option.max_rolling_batch_size", same=("1", 1), there="1"),
    "max_rolling_batch_size": Word("max_num_seqs", whole, there="32"),
    "max_rolling_batch_prefill_tokens": Word("prefill_chunk_tokens", whole),
    "dtype": Word("dtype", dtype, there="fp16"),
    "amp": Word("dtype", dtype, there="f16"),
    "trust_remote_code": Word(refused="the code of a model directory is never run; leave it out", same=OFF, there="false"),
    "task": Word(refused="models here generate text; leave it out", same=("text-generation", "auto"), there="text-generation"),
    "output_formatter": Word(
        "lmi.output_formatter", among({name: name for name in ("json", "jsonlines", "sse")}), there="json, jsonlines where streamed"
    ),
    "tgi_compat": Word("lmi.tgi_compat", flag, there="false"),
    "bedrock_compat": Word(refused="replies of Bedrock's shape are not written; leave it out", same=OFF, there="false"),
    "waiting_steps": Word(note="prefills and decode steps alternate by themselves"),
    "mpi_mode": Word(note="rayneuron starts its own processes, one a rank"),
    "multi_node": Word(refused="write option.cluster_size: the number of nodes", same=OFF),
    "async_mode": Word(note="the server is asynchronous; steps of the device overlap by compile.async_mode"),
    "enable_streaming": Word(note=_STREAMS),
    "model_loading_timeout": Word("group.load_s", seconds, note="counted since the last progress of a worker", there="1800 s"),
    "predict_timeout": Word("limits.request_timeout_s", seconds, there="120 s"),
    "parallel_loading": Word(note="replicas load side by side"),
    "max_output_size": Word(refused="a reply ends by its tokens; write sampling_defaults.max_tokens"),
    "retry_threshold": Word(refused=_RESTARTS),
    "default_accept": Word(note="the reply's type is its dialect's"),
    "quantize": Word("quantization", _quantization, ("None", None), there="none"),
    "quantization": Word("quantization", _quantization, ("None", None), there="none"),
    "load_in_8bit": Word("quantization", int8, there="false"),
    "neuron_quant": Word("quantization", int8, there="false"),
    "neuron_optimize_level": Word("compile.optimization", whole, ("None", None), there="2"),
    "enable_mixed_precision_accumulation": Word("compile.mixed_accumulation", flag, ("None", None), there="off"),
    "enable_saturate_infinity": Word("compile.flags", _saturate, ("None", None), there="off"),
    "compiled_graph_path": Word("compile.cache", note="graphs of another system are not read; ours are kept there", there="none"),
    "load_split_model": Word(refused=OWN_SHARDS, same=OFF, there="false"),
    "save_mp_checkpoint_path": Word(refused=OWN_GRAPHS),
    "partition_schema": Word(refused=OWN_GRAPHS),
    "preloaded_model": Word(refused="a model is loaded from model.path; leave it out", same=OFF),
    "model_loader": Word(refused="an Optimum artifact is not read; name the checkpoint", same=("tnx", "vllm", "nxdi"), there="tnx"),
    "on_device_generation": Word(refused="the device samples anyway; write what that file says under sampling_defaults", same=OFF),
    "override_neuron_config": Word("buckets", overrides, note="each name in it is NxD Inference's"),
    **drafts.LMI,
    **adapters.LMI,
    "max_logprobs": _vllm("max_logprobs"),
}
SERVER: Final[Table] = {
    "engine": Word(refused="models run in an engine of our own; write engine=Python", same=("Python", "MPI", "python", "mpi")),
    "minWorkers": Word(note="replicas are serving.num_replicas, of which minWorkers and maxWorkers say the same where they are equal"),
    "maxWorkers": Word("serving.num_replicas", whole, there="cores / degree"),
    "job_queue_size": Word("limits.max_waiting", whole, there="1000"),
    "batch_size": Word(refused="requests are batched continuously; write option.max_rolling_batch_size", same=("1",), there="1"),
    "max_batch_delay": Word(note=BY_ITSELF),
    "max_idle_time": Word(note=BY_ITSELF),
    "load_on_devices": Word(note="cores are taken from the ledger of the node"),
}
_PASSED: Final = (  # names that are the same here
    *("max_model_len", "max_num_seqs", "seed", "block_size", "enable_prefix_caching", "tensor_parallel", "pipeline_parallel"),
    "speculative_config",
)
OPTIONS: Final[Table] = {
    **{name: _vllm(name) for name in aliases.NAMES if name not in ("model", "device")},
    **{name: Word(name, literal) for name in _PASSED},
    **COMMON,
    **_LMI,
}
OWN: Final = (*COMMON, *_LMI)  # LMI's own, without what it passes on

# Variables of the container -> the option they say, where nothing else does.
VARIABLES: Final = {
    "TENSOR_PARALLEL_DEGREE": "tensor_parallel_degree",
    "PIPELINE_PARALLEL_DEGREE": "pipeline_parallel_degree",
    "SM_NUM_GPUS": "tensor_parallel_degree",
    "HF_MODEL_QUANTIZE": "quantize",
    "HF_MODEL_TRUST_REMOTE_CODE": "trust_remote_code",
    "MAX_BATCH_SIZE": "max_rolling_batch_size",
    "MAX_BATCH_PREFILL_TOKENS": "max_rolling_batch_prefill_tokens",
    "SAGEMAKER_STARTUP_TIMEOUT": "model_loading_timeout",
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "predict_timeout",
    "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "default_accept",
    "NEURON_CONTEXT_LENGTH_ESTIMATE": "context_length_estimate",
    "NEURON_QUANT": "neuron_quant",
    "NEURON_ON_DEVICE_EMBEDDING": "on_device_embedding",
    "NEURON_ON_DEV_GENERATION": "on_device_generation",
    "NEURON_SHARD_OVER_SEQUENCE": "shard_over_sequence",
    "NEURON_SEQUENCE_PARALLEL": "sequence_parallel",
    "NEURON_MULTI_NODE": "multi_node",
    "NEURON_COMPILATION_WORKER_COUNT": "compilation_worker_count",
    "NEURON_CC_PIPELINE_FACTOR": "neuron_cc_pipeline_factor",
}
SERVER_VARIABLES: Final = {
    "SERVING_JOB_QUEUE_SIZE": "job_queue_size",
    "MAX_CONCURRENT_REQUESTS": "job_queue_size",
    "SAGEMAKER_NUM_MODEL_WORKERS": "maxWorkers",
}
HUB_VARIABLES: Final = {"HF_MODEL_ID": "model_id", "HF_REVISION": "revision", "HF_TASK": "task"}
