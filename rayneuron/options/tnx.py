"""transformers-neuronx's names: keywords of from_pretrained, and of its NeuronConfig."""

from __future__ import annotations

from typing import Any, Final

from rayneuron.options.shared import COMMON, LAYOUT, OWN_GRAPHS, dtype
from rayneuron.options.words import Args, Said, Table, Word, numbers, positive, whole


def _quant(value: Any, args: Args) -> str:
    """QuantizationConfig."""
    kind = getattr(value, "quant_dtype", value)
    found = {"s8": "int8", "int8": "int8", "f8e4m3fn": "f8e4m3", "f8e4m3": "f8e4m3", "f8e5m2": "f8e5m2"}
    if kind not in found:
        raise ValueError(f"must have the quant_dtype s8, f8e4m3fn or f8e5m2, got {kind!r}")
    return found[kind]


def _rows(value: Any, args: Args) -> Any:
    many = numbers(value)
    return many[0] if len(many) == 1 else Said({"max_num_seqs": many[-1], "buckets.batch": many})


def _generation(value: Any, args: Args) -> Said:
    """GenerationConfig: the sampling of the device, which requests may have as their own; lists of one a sequence are not for a server."""
    found = {name: getattr(value, name, None) for name in ("top_k", "top_p", "temperature")}
    said = Said({f"sampling_defaults.{name}": given for name, given in found.items() if isinstance(given, int | float)})
    if not getattr(value, "do_sample", False):
        said["sampling_defaults.temperature"] = 0.0
    return said


def _continuous(value: Any, args: Args) -> int:
    return whole(getattr(value, "batch_size_for_shared_caches", value))


PRETRAINED: Final[Table] = {
    "batch_size": Word("max_num_seqs", _rows, there="1"),
    "tp_degree": Word("tensor_parallel", whole, there="2"),
    "pp_degree": Word("pipeline_parallel", whole, there="1"),
    "amp": Word("dtype", dtype, there="f32"),
    "context_unroll": Word(note="layers are unrolled where that pays"),
    "prompt_batch_size": Word(note="prefills of several prompts share a step where they fit"),
    "prefixed_length": Word("enable_prefix_caching", positive, note="every prefix is known once it was seen"),
    "trust_remote_code": Word(refused="the code of a model directory is never run; leave it out", same=(False,)),
    "revision": Word("model.revision"),
    "neuron_config": Word(note="its names are below"),
    **{name: COMMON[name] for name in ("n_positions", "context_length_estimate", "unroll", "low_cpu_mem_usage")},
}
NEURON_CONFIG: Final[Table] = {
    "quant": Word("quantization", _quant, (None,), there="none"),
    "continuous_batching": Word("max_num_seqs", _continuous, (None,), there="off"),
    "on_device_generation": Word("sampling_defaults", _generation, (None,), there="on the host"),
    "padding_side": Word(note="rows are padded at the right, prompts of a batch may have any length", there="left"),
    "bf16_rms_norm": Word(refused="norms are computed in float32; leave it out", same=(False, None)),
    "dense_unroll": LAYOUT,
    "save_mp_checkpoint_path": Word(refused=OWN_GRAPHS),
    **{name: word for name, word in COMMON.items() if name not in PRETRAINED},
}
