"""A Llama model directory: its config, its weight file, and random weights of real sizes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rayneuron.demo import vocabulary
from rayneuron.errors import ConfigError
from rayneuron.models import safe_header
from rayneuron.models.words import COMPUTE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rayneuron.demo.gguf_reader import Floats

SMALL_VOCAB = 512
_AT_ONCE = 1 << 15  # values that are cast and written at once: what is between stays in the processor's caches


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


def save(weights: Mapping[str, tuple[Sequence[int], Callable[[], Floats]]], folder: Path, dtype: str) -> None:
    """Write model.safetensors, every tensor cast to `dtype`. `weights`: shapes by name, and what gives the values when their turn comes."""
    entries = {name: (dtype.replace("fp", "f").upper(), shape) for name, (shape, _) in sorted(weights.items())}
    with open(folder / "model.safetensors", "wb") as file:
        file.write(safe_header.encoded(safe_header.laid_out(entries, {"format": "pt"}), 8))
        for _, (_, values) in sorted(weights.items()):
            flat = values().reshape(-1)
            for begin in range(0, len(flat), _AT_ONCE):
                file.write(_cast(flat[begin : begin + _AT_ONCE], dtype))


def _cast(values: Floats, dtype: str) -> bytes:
    """Float32 of a machine that is little-endian -> the bytes of `dtype`, rounded to nearest, ties to even."""
    import numpy as np

    if dtype != "bf16":
        return values.astype(np.float32 if dtype == "fp32" else np.float16).tobytes()
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint32] = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    return rounded.view(np.uint16)[1::2].tobytes()


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
    save({name: (w.shape, w.numpy) for name, w in _random_weights(size, seed).items()}, folder, dtype)
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
