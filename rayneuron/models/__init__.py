"""Model families by `model_type`: one row a name. Adding a family is one file here, one row, and one golden test.

A family's file needs no torch, so that whoever plans knows its tensors without waiting for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import shard, words
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import complete

if TYPE_CHECKING:
    import torch

FAMILIES = {
    "arcee": "nemotron",
    "bloom": "bloom",
    "cohere": "cohere",
    "cohere2": "cohere",
    "dbrx": "dbrx",
    "ernie4_5": "llama",
    "ernie4_5_moe": "ernie4_5_moe",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "glm": "glm",
    "glm4": "glm",
    "glm4_moe": "glm4_moe",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt_bigcode",
    "gpt_neox": "gpt_neox",
    "gptj": "gptj",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "granitemoe": "granite",
    "helium": "llama",
    "llama": "llama",
    "ministral": "llama",
    "mistral": "llama",
    "mixtral": "mixtral",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "opt": "opt",
    "phi": "phi",
    "phi3": "phi3",
    "qwen2": "llama",
    "qwen2_moe": "qwen_moe",
    "qwen3": "llama",
    "qwen3_moe": "qwen_moe",
    "seed_oss": "llama",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
EXPERTS = "num_experts (num_local_experts, moe_num_experts)"
STRETCHING = ("linear", "dynamic", "yarn")  # kinds whose factor is on top of max_position_embeddings

Progress = Callable[[int, int], None]  # what long work tells of itself: done, total


def family(config: dict[str, Any]) -> ModuleType:
    """The family's file. Raises CheckpointError with the nearest known `model_type`."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        near = [known for known in FAMILIES if name and known.startswith(str(name))] or difflib.get_close_matches(str(name), FAMILIES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CheckpointError(f"model_type {name!r} is not supported; {hint}supported: {', '.join(sorted(FAMILIES))}")
    return import_module(f"rayneuron.models.{FAMILIES[name]}")


def architecture(config: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json. `max_model_len` matters to longrope alone. Raises CheckpointError naming a wrong key."""
    of = family(config)
    arch: Arch = of.arch(complete(config), max_model_len)
    for count, most, say in (
        (arch.heads % arch.kv_heads, 0, f"num_attention_heads {arch.heads} is no multiple of num_key_value_heads {arch.kv_heads}"),
        (arch.top_k, arch.experts, f"num_experts_per_tok (moe_top_k) {arch.top_k} of {EXPERTS} {arch.experts}"),
    ):
        if count > most:
            raise CheckpointError(f"config.json: {say}; a key that is not there has the default of {arch.model_type} models")
    if config.get("head_dim") not in (None, arch.head_dim):
        raise CheckpointError(f"config.json sets head_dim: {config['head_dim']!r:.60}, but a {arch.model_type} model has {arch.head_dim}")
    return arch


def compute_type(word: str) -> torch.dtype:
    """The torch dtype of one of `words.COMPUTE`."""
    import torch

    found: torch.dtype = getattr(torch, words.COMPUTE[word])
    return found


def kv_type(name: str | None) -> torch.dtype | None:
    """The dtype of `kv_dtype`; None where KV has the compute dtype. Raises ConfigError."""
    from rayneuron.models.quantization import parse_kv

    return None if name is None else parse_kv(name)


def position_limit(arch: Arch) -> int | None:
    """The longest sequence the model can place, rope scaling included; None where there is no limit (alibi)."""
    if not arch.max_positions:
        return None
    stretched = int((arch.rope.original or arch.max_positions) * arch.rope.factor) if arch.rope.kind in STRETCHING else 0
    return max(arch.max_positions, stretched)


def check(
    config: dict[str, Any],
    *,
    tp: int,
    max_model_len: int,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_dtype: str | None = None,
    group_query_attention: str | None = None,
    shard_over_sequence: bool = False,
    capacity_factor: float | None = None,
) -> Arch:
    """The Arch a deployment will run, refused here if it cannot: nothing of the weights has been read.

    Raises CheckpointError (config.json) or ConfigError (the deployment), each with what to write instead.
    """
    arch = architecture(config, max_model_len)
    if arch.head_dim == arch.hidden // arch.heads and arch.hidden % arch.heads:
        raise CheckpointError(f"hidden_size (n_embd, d_model) {arch.hidden} is no multiple of num_attention_heads (n_head) {arch.heads}")
    if arch.rope.dim % 2:
        raise CheckpointError(f"config.json asks for rope over {arch.rope.dim} channels of head_dim {arch.head_dim}, which is odd")
    if arch.act not in words.ACTIVATIONS:
        known = ", ".join(words.ACTIVATIONS)
        raise CheckpointError(
            f"activation {arch.act!r} is not supported (hidden_act, hidden_activation, activation_function, ffn_act_fn); supported: {known}"
        )
    limit = position_limit(arch)
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the model's {limit} positions; write max_model_len: {limit} or less, "
            "or a rope_scaling in config.json that reaches so far"
        )
    words.compute(dtype, config)
    if quantization is not None:
        words.quantised(quantization)
    if kv_dtype is not None:
        words.kv(kv_dtype)
    words.check_stored(config, quantization)
    if capacity_factor is not None and (capacity_factor <= 0 or not arch.experts):
        raise ConfigError(
            f"capacity_factor {capacity_factor} needs a mixture of experts and a positive number; leave it out to drop no token"
        )
    arch = replace(arch, gqa=group_query_attention, capacity_factor=capacity_factor)
    if shard_over_sequence:
        scores = "attention sinks" if arch.sinks else "soft-capped scores" if arch.softcap_scores else ""
        if arch.position == "alibi" or scores or tp == 1:
            why = "alibi positions" if arch.position == "alibi" else scores or "tensor parallel degree 1"
            raise ConfigError(f"shard_over_sequence does not go with {why}; leave it out")
        arch = replace(arch, sequence_shards=shard.sequence_shards(arch.heads, arch.kv_heads, tp))
    shard.head_plan(arch.heads, arch.kv_heads, tp, arch.gqa, arch.sequence_shards)
    return arch
