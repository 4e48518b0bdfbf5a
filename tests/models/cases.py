"""Tiny random models of every family, saved to files, and the runs that tests put them through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from rayneuron import models
from rayneuron.devices.base import Solo
from rayneuron.models import decoder, hub, ops, weights

VOCAB = 97  # odd, so that every degree pads the vocabulary
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MHA = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
OPT = {**MHA, "ffn_dim": 112}
del OPT["intermediate_size"]
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "llama_tied": lambda: tf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama_biased": lambda: tf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama_head_dim": lambda: tf.LlamaConfig(**SMALL, head_dim=24),
    "mistral": lambda: tf.MistralConfig(**SMALL, sliding_window=8, head_dim=16),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen2_windows": lambda: tf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=16),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SMALL, **MOE, decoder_sparse_step=1),
    "qwen3_moe_dense": lambda: tf.Qwen3MoeConfig(**SMALL, **{**MOE, "norm_topk_prob": False}, decoder_sparse_step=1, mlp_only_layers=[0]),
    "gpt2": lambda: tf.GPT2Config(**GPT),
    "gpt_bigcode": lambda: tf.GPTBigCodeConfig(**GPT, multi_query=True),
    "gpt_bigcode_mha": lambda: tf.GPTBigCodeConfig(**GPT, multi_query=False),
    "opt": lambda: tf.OPTConfig(**OPT, word_embed_proj_dim=64),
    "opt_350m": lambda: tf.OPTConfig(**OPT, word_embed_proj_dim=32, do_layer_norm_before=False),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4),
    "bloom_six_heads": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=96, n_layer=2, n_head=6),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**MHA),
    "gpt_neox_serial": lambda: tf.GPTNeoXConfig(**MHA, use_parallel_residual=False),
    "gptj": lambda: tf.GPTJConfig(**GPT, rotary_dim=8),
    "dbrx": lambda: tf.DbrxConfig(
        vocab_size=VOCAB, d_model=64, n_layers=2, n_heads=4, max_seq_len=128, attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """A model directory, and transformers' logits of `ids` [2,N], computed from those same files."""

    path: Path
    ids: Tensor
    logits: Tensor


def save(config: Any, folder: Path, tokens: int = 40, seed: int = 0) -> Saved:
    """Write a random model; weights are moved off their initial values so that biases and norms matter."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(folder)
    return reference(folder, tokens)


def reference(folder: Path, tokens: int = 40) -> Saved:
    """transformers' logits, read from the files."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (2, tokens), generator=generator, dtype=torch.int32)
    with torch.no_grad():
        return Saved(folder, ids, model(ids.long(), use_cache=False).logits)


class Threads:
    """Collectives between threads of one process."""

    def __init__(self, rank: int, ranks: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self.rank, self.ranks, self._barrier, self._box = rank, ranks, barrier, box

    def _all(self, x: Tensor) -> list[Tensor]:
        self._box[self.rank] = x
        self._barrier.wait()
        everybody = list(self._box)
        self._barrier.wait()
        return everybody

    def reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._all(x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.reduce(x).chunk(self.ranks, dim)[self.rank]


def on_ranks(ranks: int, work: Callable[[Any], Any]) -> list[Any]:
    """`work(comm)` of every rank, in threads; raises what any rank raised."""
    if ranks == 1:
        with torch.no_grad():
            return [work(Solo())]
    barrier, box, out, failed = threading.Barrier(ranks), [None] * ranks, [None] * ranks, []

    def one(rank: int) -> None:
        try:
            with torch.no_grad():
                out[rank] = work(Threads(rank, ranks, barrier, box))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(r,)) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])
    return out


@dataclass
class Runner:
    """One rank of a model: weights, KV of `rows` rows and `length` positions (the last row and column are scratch)."""

    arch: Any
    weights: Any
    kv: list[Tensor]
    comm: Any
    ops: Any = ops.PLAIN

    @classmethod
    def open(cls, path: Path, comm: Any, *, rows: int = 4, length: int = 64, kv_dtype: torch.dtype | None = None, arch: Any = None, **options: Any) -> Runner:
        config = hub.read_config(path)
        arch = arch or models.architecture(config)
        dtype = options.pop("dtype", torch.float32)
        loaded = weights.load(
            arch, models.family(config), hub.Checkpoint(path), dtype=dtype, rank=comm.rank, ranks=comm.ranks, **options
        )
        kv = [torch.zeros(s, dtype=kv_dtype or dtype) for s in decoder.kv_shapes(arch, rows, length, comm.ranks)]
        return cls(arch, loaded, kv, comm)

    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor, length: int) -> Tensor:
        hidden = decoder.forward(self.arch, self.ops, self.comm, self.weights, self.kv, tokens, positions, rows, length)
        return decoder.logits(self.arch, self.ops, self.comm, self.weights, hidden)

    def chunk(self, ids: Tensor, start: int, stop: int, bucket: int, length: int) -> Tensor:
        """Tokens [start, stop) of every row in one step padded to `bucket`; rows 2, 0, and an idle one on the scratch row."""
        b, n = ids.shape[0], stop - start
        scratch = self.kv[0].shape[1] - 1
        tokens = torch.zeros(b + 1, bucket, dtype=torch.int32)
        positions = torch.full((b + 1, bucket), self.scratch_column, dtype=torch.int32)
        tokens[:b, :n], positions[:b, :n] = ids[:, start:stop], torch.arange(start, stop, dtype=torch.int32)
        positions[b] = 0
        rows = torch.tensor([2, 0][:b] + [scratch], dtype=torch.int32)
        out = self.logits(tokens, positions, rows, length)
        assert out.isfinite().all()
        return out[:b, :n]

    @property
    def scratch_column(self) -> int:
        return 63


def run(runner: Runner, ids: Tensor, prompt: int, bucket: int = 16) -> Tensor:
    """Prefill of `prompt` tokens in chunks of `bucket`, then single tokens, then a step of three: logits of every token [B,N,V]."""
    n = ids.shape[1]
    out = [runner.chunk(ids, s, min(s + bucket, prompt), bucket, 32 if prompt <= 32 else 64) for s in range(0, prompt, bucket)]
    out += [runner.chunk(ids, t, t + 1, 1, 64) for t in range(prompt, n - 3)]
    out.append(runner.chunk(ids, n - 3, n, 3, 64))
    return torch.cat(out, 1)
