"""llama.cpp through llama-cpp-python's C interface: rows in lock step, one batch a step; the model is written as GGUF without a vocabulary.

Llama checkpoints only. bf16 and fp32 as they are; `int8` is its Q8_0.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from answer import Run, Steps, answer

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
QUANT = {"bf16": gguf.GGMLQuantizationType.BF16, "fp32": gguf.GGMLQuantizationType.F32, "int8": gguf.GGMLQuantizationType.Q8_0}


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of model.safetensors as float32, read without torch."""
    raw = np.memmap(path / "model.safetensors", mode="r")
    size = int(raw[:8].view("<u8")[0])
    header, body = json.loads(bytes(raw[8 : 8 + size])), raw[8 + size :]
    made = {}
    for name, entry in header.items():
        if name != "__metadata__":
            part = body[slice(*entry["data_offsets"])]
            wide = part.view("<f4") if entry["dtype"] == "F32" else (part.view("<u2").astype("<u4") << 16).view("<f4")
            made[name] = wide.reshape(entry["shape"])
    return made


def pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary halves to neighbours: llama.cpp's row order of q and k."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, target: Path, dtype: str) -> None:
    """The GGUF of a Llama directory."""
    config = json.loads((path / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    w = gguf.GGUFWriter(target, "llama")
    w.add_vocab_size(config["vocab_size"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    size = config.get("head_dim") or config["hidden_size"] // heads
    w.add_rope_dimension_count(size)
    w.add_key_length(size)
    w.add_value_length(size)
    w.add_rope_freq_base(float(config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 1e4)))
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_tokenizer_model("no_vocab")
    for name, value in tensors(path).items():
        stem = name.removeprefix("model.").removesuffix(".weight")
        if stem.startswith("layers."):
            _, layer, inner = stem.split(".", 2)
            ours = f"blk.{layer}.{NAMES[inner]}"
        else:
            ours = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem]
        if ours.endswith(("attn_q", "attn_k")):
            value = pairs(value, heads if ours.endswith("q") else kv_heads)
        kind = QUANT[dtype] if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        w.add_tensor(f"{ours}.weight", gguf.quants.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def open_peer(settings: dict[str, Any]) -> Run:
    """settings: model, dtype, threads, rows, length."""
    path = Path(settings["model"])
    target = path / f"bench-{settings['dtype']}.gguf"
    if not target.exists():
        write(path, target.with_suffix(".draft"), settings["dtype"])
        target.with_suffix(".draft").rename(target)
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    print(llama_cpp.llama_print_system_info().decode(), file=sys.stderr)
    model = llama_cpp.llama_load_model_from_file(str(target).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {target}")
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = settings["rows"]
    params.n_ctx = settings["rows"] * -(-settings["length"] // 256) * 256
    params.n_batch = params.n_ubatch = 2048  # faster in every case than 512; so is flash attention, which it chooses
    params.n_threads = params.n_threads_batch = settings["threads"]
    params.kv_unified = False  # a row attends its own cells only
    context = llama_cpp.llama_new_context_with_model(model, params)
    vocab = llama_cpp.llama_n_vocab(llama_cpp.llama_model_get_vocab(model))
    memory, batch = llama_cpp.llama_get_memory(context), llama_cpp.llama_batch_init(2048, 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, position, 1, row, wanted
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    def likeliest(place: int) -> int:
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, place), (vocab,)).argmax())

    def run(prompts: list[list[int]], new: int) -> Steps:
        llama_cpp.llama_memory_clear(memory, True)
        counts, last, steps = [0] * len(prompts), [0] * len(prompts), []
        for row, prompt in enumerate(prompts):
            for start in range(0, len(prompt), 2048):
                part = prompt[start : start + 2048]
                decode([(t, start + i, row, start + i == len(prompt) - 1) for i, t in enumerate(part)])
            last[row], counts[row] = likeliest(len(part) - 1), 1
            steps.append((time.perf_counter(), list(counts)))
        for i in range(1, new):
            decode([(last[row], len(prompt) + i - 1, row, True) for row, prompt in enumerate(prompts)])
            last, counts = [likeliest(row) for row in range(len(prompts))], [i + 1] * len(prompts)
            steps.append((time.perf_counter(), list(counts)))
        return steps

    return run


if __name__ == "__main__":
    answer(open_peer)
