"""Tiny random models of every family, saved to files, with transformers' logits of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from tests.models.runs import Runner, on_ranks, run

__all__ = ["CONFIGS", "GPT", "LATER", "MHA", "MOE", "OPT", "PARAMS", "SMALL", "Runner", "Saved", "on_ranks", "reference", "run", "save"]

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
SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}
GEMMA3 = {**SMALL, "num_hidden_layers": 3, "sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 20,
          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
FALCON = {k: v for k, v in MHA.items() if k != "intermediate_size"} | {"ffn_hidden_size": 112}

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
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(**SMALL, **SHARED),
    "qwen2_moe_windows": lambda: tf.Qwen2MoeConfig(
        **SMALL, **SHARED, qkv_bias=False, use_sliding_window=True, sliding_window=8, decoder_sparse_step=2
    ),
    "phi3": lambda: tf.Phi3Config(**SMALL, pad_token_id=0),
    "phi3_long": lambda: tf.Phi3Config(
        **SMALL, pad_token_id=0, sliding_window=8, original_max_position_embeddings=64, partial_rotary_factor=0.5,
        rope_parameters={"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 1.5, 2.0, 3.0]},
    ),
    "gemma2": lambda: tf.Gemma2Config(**SMALL, head_dim=24, sliding_window=8, query_pre_attn_scalar=20, attn_logit_softcapping=2.0),
    "gemma3_text": lambda: tf.Gemma3TextConfig(**GEMMA3),
    "granite": lambda: tf.GraniteConfig(
        **SMALL, embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.0625, logits_scaling=0.5, attention_bias=True
    ),
    "olmo2": lambda: tf.Olmo2Config(**SMALL),
    "olmo2_mha": lambda: tf.Olmo2Config(**MHA, attention_bias=True),
    "starcoder2": lambda: tf.Starcoder2Config(**SMALL, sliding_window=8),
    "stablelm": lambda: tf.StableLmConfig(**SMALL, use_qkv_bias=True, partial_rotary_factor=0.5),
    "stablelm_parallel": lambda: tf.StableLmConfig(**SMALL, use_parallel_residual=True),
    "falcon": lambda: tf.FalconConfig(**FALCON),
    "falcon_new": lambda: tf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_serial": lambda: tf.FalconConfig(**FALCON, multi_query=False, parallel_attn=False, bias=True),
    "gpt_oss": lambda: tf.GptOssConfig(
        **SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, swiglu_limit=0.5, pad_token_id=0,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
    ),
    "gemma": lambda: tf.GemmaConfig(**SMALL, head_dim=24),
    "smollm3": lambda: tf.SmolLM3Config(**SMALL, no_rope_layers=[1, 0], pad_token_id=0),
    "smollm3_windows": lambda: tf.SmolLM3Config(
        **SMALL, no_rope_layers=[0, 1], pad_token_id=0, use_sliding_window=True, sliding_window=8, attention_bias=True
    ),
    "seed_oss": lambda: tf.SeedOssConfig(**SMALL, head_dim=24),
    "ernie4_5": lambda: tf.Ernie4_5Config(**SMALL, head_dim=16, use_bias=True),
    "helium": lambda: tf.HeliumConfig(**SMALL, head_dim=16, pad_token_id=0),
    "ministral": lambda: tf.MinistralConfig(
        **SMALL, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": lambda: tf.PhiConfig(**SMALL),
    "glm": lambda: tf.GlmConfig(**SMALL, head_dim=16, pad_token_id=0),
    "glm4": lambda: tf.Glm4Config(**SMALL, head_dim=16, pad_token_id=0),
    "cohere": lambda: tf.CohereConfig(**SMALL, logit_scale=2.0, attention_bias=True),
    "cohere2": lambda: tf.Cohere2Config(**SMALL, logit_scale=2.0, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "exaone4": lambda: tf.Exaone4Config(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "exaone4_full": lambda: tf.Exaone4Config(**SMALL, sliding_window=None, layer_types=["full_attention", "full_attention"]),
    "nemotron": lambda: tf.NemotronConfig(**SMALL, attention_bias=True),
    "arcee": lambda: tf.ArceeConfig(**SMALL, mlp_bias=True),
    "olmo": lambda: tf.OlmoConfig(**SMALL, clip_qkv=0.5),
    "olmo3": lambda: tf.Olmo3Config(
        **SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "olmoe": lambda: tf.OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
    "granitemoe": lambda: tf.GraniteMoeConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.0625,
        logits_scaling=0.5,
    ),
    "glm4_moe": lambda: tf.Glm4MoeConfig(
        **SMALL, moe_intermediate_size=48, n_routed_experts=6, num_experts_per_tok=2, use_qk_norm=True, routed_scaling_factor=1.5,
    ),
    "ernie4_5_moe": lambda: tf.Ernie4_5_MoeConfig(**SMALL, moe_intermediate_size=48, moe_num_experts=6, moe_k=2),
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
        vocab_size=VOCAB, d_model=64, n_layers=2, n_heads=4, max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    ),
}  # fmt: skip

# Families that came later: of most of them the default run takes a part, and one of each kind of layer whole.
NAMES = (
    "arcee", "cohere", "ernie4_5", "exaone4", "falcon", "gemma", "glm", "gpt_oss", "granite", "helium", "ministral", "nemotron", "olmo",
    "phi", "qwen2_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
LATER = tuple(n for n in CONFIGS if n.startswith(NAMES))
WHOLE = ("cohere2", "gemma3_text", "gpt_oss", "granite", "nemotron", "olmo2", "qwen2_moe")
PARAMS = [pytest.param(n, marks=pytest.mark.slow) if n in LATER and n not in WHOLE else n for n in CONFIGS]


@dataclass(frozen=True)
class Saved:
    """A model directory, and transformers' logits of `ids` [2,N], computed from those same files."""

    path: Path
    ids: Tensor
    logits: Tensor


def save(config: Any, folder: Path, tokens: int = 24, seed: int = 0) -> Saved:
    """Write a random model; weights are moved off their initial values so that biases and norms matter."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        corrections = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for p in (*model.parameters(), *corrections):
            p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(folder)
    return reference(folder, tokens)


def reference(folder: Path, tokens: int = 24) -> Saved:
    """transformers' logits, read from the files."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (2, tokens), generator=generator, dtype=torch.int32)
    with torch.no_grad():
        return Saved(folder, ids, model(ids.long(), use_cache=False).logits)
