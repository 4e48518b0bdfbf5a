"""Long prompts in chunks equal transformers, attention never holds T x L x heads, and KV split by position equals one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

from rayneuron import models
from rayneuron.models import hub, ops
from rayneuron.models.collectives import Solo
from tests.models import cases
from tests.models.cases import Runner, Saved

LONG = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32768,
}  # fmt: skip
KINDS = {
    "default": {"rope_theta": 1e6, "rope_type": "default"},
    "llama3": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4096,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
}  # fmt: skip


def prefill(saved: Saved, tokens: int, chunk: int) -> float:
    """Largest difference of any chunk's logits, and of one token after them."""
    ids = saved.ids[:1]
    runner = Runner.open(saved.path, Solo(), rows=1, length=tokens, block=512)
    row, worst = torch.zeros(1, dtype=torch.int32), 0.0
    with torch.no_grad():
        for start, stop in [*((s, s + chunk) for s in range(0, tokens - 1 - chunk, chunk)), (tokens - 1, tokens)]:
            if stop == tokens and start % chunk:  # what is left before the last token
                left = (tokens - 1) // chunk * chunk
                at = torch.arange(left, start, dtype=torch.int32)[None]
                worst = max(worst, (runner.logits(ids[:, left:start], at, row, start) - saved.logits[:1, left:start]).abs().max().item())
            at = torch.arange(start, stop, dtype=torch.int32)[None]
            worst = max(worst, (runner.logits(ids[:, start:stop], at, row, stop) - saved.logits[:1, start:stop]).abs().max().item())
    return worst


@pytest.mark.parametrize("kind", list(KINDS))
def test_chunks_equal_transformers(kind: str, tmp_path: Path) -> None:
    saved = cases.save(tf.LlamaConfig(**LONG, rope_parameters=KINDS[kind]), tmp_path, tokens=2500)
    assert prefill(saved, 2500, 512) < 1e-4


@pytest.mark.slow
def test_chunks_equal_transformers_to_32k(tmp_path: Path) -> None:
    saved = cases.save(tf.LlamaConfig(**LONG, rope_parameters=KINDS["llama3"]), tmp_path, tokens=32768)
    assert prefill(saved, 32768, 512) < 1e-4


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(4, 4, 64), (4, 2, 64), (4, 2, 1), (8, 1, 3)])
def test_attention_is_the_flash_kernel(heads: int, kv_heads: int, tokens: int) -> None:
    """The fused kernel works in blocks; its fallback would hold tokens x length x heads."""
    kv, blocks = (torch.randn(6, kv_heads, 64, 16), torch.randn(6, kv_heads, 64, 16)), torch.tensor([[1, 4], [3, 0]], dtype=torch.int32)
    q, bias = torch.randn(2, tokens, heads, 16), torch.zeros(2, 1, tokens, 128)
    with torch.no_grad(), torch.profiler.profile() as profile:
        ops.attend(q, kv, blocks, 128, bias, 0.25)
    names = {e.name for e in profile.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names and "aten::_scaled_dot_product_attention_math" not in names


@pytest.mark.parametrize(("ranks", "block"), [(2, 16), (4, 63), (4, 16)])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_bigcode", "gpt2", "qwen3_moe"])
def test_kv_split_by_position_equals_transformers(name: str, ranks: int, block: int, tmp_path: Path) -> None:
    """Flash decoding: each rank holds every n-th position of a block, which n need not divide."""
    saved = cases.save(cases.CONFIGS[name](), tmp_path, tokens=30)
    arch = models.check(hub.read_config(tmp_path), tp=ranks, max_model_len=64, shard_over_sequence=True)
    assert arch.sequence_shards > 1

    def work(comm):
        runner = Runner.open(tmp_path, comm, arch=arch, block=block)
        assert runner.kv.layers[0][0].shape[2] == -(-block // arch.sequence_shards)
        return [cases.run(runner, saved.ids, prompt) for prompt in (15, 17)]

    for everybody in cases.on_ranks(ranks, work):
        for got in everybody:
            assert (got - saved.logits).abs().max() < 1e-4
