"""A Llama model directory: its config, its weight file, and random weights of real sizes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rayneuron.demo import vocabulary
from rayneuron.errors import ConfigError
from rayneuron.models.words import COMPUTE

if TYPE_CHECKING:
    from torch import Tensor

SMALL_VOCAB = 512


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of one Llama with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    length: int = 8192


SIZES: Mapping[str, Size] = {
    "tiny": Size(64, 2, 4, 2, 16, 128, SMALL_VOCAB),  # unit tests
    "tp8": Size(256, 4, 8, 8, 32, 704, SMALL_VOCAB),  # unit tests of up to eight ranks
    "tp128": Size(512, 2, 128, 8, 4, 1024, SMALL_VOCAB, 16384),  # and of up to 128, as long as the files in deployments/ ask for
    "160m": Size(768, 12, 12, 4, 64, 2048, 49152),
    "0.5b": Size(1024, 24, 16, 8, 64, 3584, 49152),
    "1b": Size(2048, 16, 32, 8, 64, 8192, 49152),  # Llama 3.2 1B but for the vocabulary
}


def checked(dtype: str) -> str:
    """The name itself, if it is bf16, fp16 or fp32; ConfigError otherwise."""
    if dtype not in COMPUTE:
        raise ConfigError(f"dtype must be one of {', '.join(COMPUTE)}, got {dtype!r}")
    return dtype


def save(weights: Mapping[str, Tensor], folder: Path, dtype: str) -> None:
    """Write model.safetensors, every tensor cast to `dtype`, readable as the files beside it."""
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, COMPUTE[dtype])
    path = folder / "model.safetensors"
    save_file({name: value.to(kind) for name, value in weights.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it the owner's alone


def write_config(size: Size, folder: Path, dtype: str, *, length: int, theta: float, epsilon: float) -> None:
    """Write config.json and generation_config.json; ids 1 and 2 begin and end a text."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **ids,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.ffn,
        "max_position_embeddings": length,
        "mlp_bias": False,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": epsilon,
        "rope_scaling": None,
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "torch_dtype": COMPUTE[dtype],
        "use_cache": True,
        "vocab_size": size.vocab,
    }
    for name, value in (("config.json", config), ("generation_config.json", ids)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def write_random(size: Size, seed: int, folder: Path, dtype: str, tokenizer: Path | None) -> None:
    """Write a Llama of random weights with the tokenizer of the directory `tokenizer`, or the small one where that is None."""
    save(_random_weights(size, seed), folder, dtype)
    write_config(size, folder, dtype, length=size.length, theta=100000.0, epsilon=1e-5)
    if tokenizer is None:
        vocabulary.write(vocabulary.small(size.vocab), folder, size.length, vocabulary.CHATML)
        return
    for name in vocabulary.FILES:
        shutil.copy(tokenizer / name, folder / name)


def _random_weights(size: Size, seed: int) -> dict[str, Tensor]:
    """Weights of variance 1 / fan-in, so that every layer counts in the logits, and norms off 1, so that a forgotten one shows."""
    import torch

    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * float(columns**-0.5)

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(size.hidden, generator=draw)

    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    weights = {"model.embed_tokens.weight": matrix(size.vocab, size.hidden), "model.norm.weight": norm()}
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": matrix(queries, size.hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(keys, size.hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(keys, size.hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(size.hidden, queries),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}mlp.gate_proj.weight": matrix(size.ffn, size.hidden),
            f"{prefix}mlp.up_proj.weight": matrix(size.ffn, size.hidden),
            f"{prefix}mlp.down_proj.weight": matrix(size.hidden, size.ffn),
        }
    return weights
