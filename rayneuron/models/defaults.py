"""The keys of each model type's config.json, and what absent ones are: the class defaults of transformers 5, as data; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Maybe:
    """A key that may be null, which means "none", or "as the others say"; and what it is where it is absent. `null`: whether it may."""

    kind: type | tuple[type, ...]
    default: Any = None
    null: bool = True


_NUMBER = (int, float)
# A type: the key must be there, since no two models share the value. Else the default, of which type a value must be.
_LLAMA = {
    "vocab_size": int, "hidden_size": int, "intermediate_size": int, "num_hidden_layers": int, "num_attention_heads": int,
    "num_key_value_heads": Maybe(int), "head_dim": Maybe(int), "hidden_act": "silu", "max_position_embeddings": int,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_PLAIN = {name: default for name, default in _LLAMA.items() if name != "head_dim"}
_GEMMA = {name: default for name, default in _LLAMA.items() if name != "hidden_act"} | {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": Maybe(int, 4096), "layer_types": Maybe(list),
    "use_bidirectional_attention": Maybe(bool),
}  # fmt: skip
_BARE = {name: default for name, default in _PLAIN.items() if name != "rms_norm_eps"}
_COHERE = _BARE | {"tie_word_embeddings": True, "attention_bias": False}
_GLM = _LLAMA | {"rms_norm_eps": 1.5625e-7, "attention_bias": True}
_FACTOR = Maybe((int, float), 1.0, null=False)
_GRANITE = _PLAIN | {
    "attention_bias": False, "embedding_multiplier": _FACTOR, "logits_scaling": _FACTOR, "residual_multiplier": _FACTOR,
    "attention_multiplier": _FACTOR,
}  # fmt: skip
_MISTRAL = _LLAMA | {"num_key_value_heads": 8, "sliding_window": Maybe(int, 4096)}
_QWEN = _PLAIN | {
    "num_key_value_heads": Maybe(int, 32), "use_sliding_window": False, "sliding_window": Maybe(int, 4096),
}  # fmt: skip
_QWEN2 = _QWEN | {"max_window_layers": 28, "layer_types": Maybe(list)}
_GPT = {
    "vocab_size": int, "n_positions": int, "n_embd": int, "n_layer": int, "n_head": int, "n_inner": Maybe(int),
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
_GPT2 = _GPT | {"scale_attn_weights": True, "tie_word_embeddings": True}

FIELDS: dict[str, dict[str, Any]] = {
    "arcee": _LLAMA | {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
    "bloom": {
        "vocab_size": int, "hidden_size": int, "n_layer": int, "n_head": int, "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True,
    },
    "cohere": _COHERE | {"layer_norm_eps": Maybe(float, 1e-5), "logit_scale": Maybe(float, 0.0625), "use_qk_norm": Maybe(bool, False)},
    "cohere2": _COHERE | {
        "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": Maybe(int, 4096), "layer_types": Maybe(list),
    },
    "dbrx": {
        "d_model": int, "n_heads": int, "n_layers": int, "max_seq_len": int, "vocab_size": int, "attn_config": dict, "ffn_config": dict,
        "tie_word_embeddings": False,
    },
    "ernie4_5": _LLAMA | {
        "num_key_value_heads": Maybe(int, 2), "head_dim": Maybe(int, 128), "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "use_bias": Maybe(bool, False),
    },
    "ernie4_5_moe": _PLAIN | {
        "num_key_value_heads": Maybe(int, 4), "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_bias": Maybe(bool, False),
        "moe_intermediate_size": 1536, "moe_k": Maybe(int, 6), "moe_num_experts": Maybe(int, 64), "moe_num_shared_experts": Maybe(int, 2),
        "moe_layer_start_index": Maybe(int, 1), "moe_layer_end_index": Maybe(int, -1), "moe_layer_interval": Maybe(int, 1),
        "moe_norm_min": Maybe(float, 1e-12),
    },
    "exaone4": _PLAIN | {
        "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": Maybe(int, 4096), "sliding_window_pattern": Maybe((int, str), 4),
        "layer_types": Maybe(list),
    },
    "falcon": {
        "vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int, "num_ln_in_parallel_attn": Maybe(int),
        "layer_norm_epsilon": Maybe(float, 1e-5), "num_kv_heads": Maybe(int), "alibi": Maybe(bool, False),
        "new_decoder_architecture": Maybe(bool, False), "multi_query": Maybe(bool, True), "parallel_attn": Maybe(bool, True),
        "bias": Maybe(bool, False), "max_position_embeddings": 2048, "ffn_hidden_size": Maybe(int), "activation": Maybe(str, "gelu"),
        "tie_word_embeddings": True,
    },
    "gemma": _LLAMA | {
        "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
        "use_bidirectional_attention": Maybe(bool),
    },
    "gemma2": _GEMMA | {"final_logit_softcapping": Maybe(float, 30.0), "attn_logit_softcapping": Maybe(float, 50.0)},
    "gemma3_text": _GEMMA | {"final_logit_softcapping": Maybe(float), "use_bidirectional_attention": Maybe(bool, False)},
    "glm": _GLM | {"num_key_value_heads": Maybe(int, 2), "head_dim": Maybe(int, 128)},
    "glm4": _GLM | {"num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": _PLAIN | {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False, "num_mtp_layers": 1,
    },
    "gpt2": _GPT2 | {"scale_attn_by_inverse_layer_idx": False},
    "gpt_bigcode": _GPT2 | {"activation_function": "gelu_pytorch_tanh", "multi_query": True},
    "gpt_neox": {
        "vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int, "intermediate_size": int,
        "hidden_act": "gelu", "max_position_embeddings": int, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "use_parallel_residual": True, "attention_bias": True,
    },
    "gptj": _GPT | {"rotary_dim": 64, "tie_word_embeddings": False},
    "gpt_oss": {name: default for name, default in _LLAMA.items() if name != "hidden_act"} | {
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "num_local_experts": 128, "num_experts_per_tok": 4,
        "sliding_window": Maybe(int, 128), "layer_types": Maybe(list), "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True,
    },
    "granite": _GRANITE | {"mlp_bias": False},
    "granitemoe": {name: Maybe(_NUMBER, 1.0) if default is _FACTOR else default for name, default in _GRANITE.items()} | {
        "num_local_experts": Maybe(int, 8), "num_experts_per_tok": Maybe(int, 2),
    },
    "helium": _LLAMA | {
        "num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "attention_bias": False, "mlp_bias": False,
    },
    "llama": _LLAMA | {"attention_bias": False, "mlp_bias": False},
    "ministral": _MISTRAL | {"head_dim": int, "layer_types": Maybe(list)},
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL | {"rms_norm_eps": 1e-5, "sliding_window": Maybe(int), "num_experts_per_tok": 2, "num_local_experts": 8},
    "nemotron": _BARE | {"hidden_act": "relu2", "norm_eps": 1e-5, "head_dim": Maybe(int), "attention_bias": False, "mlp_bias": False},
    "olmo": _BARE | {"attention_bias": False, "clip_qkv": Maybe(float)},
    "olmo2": _PLAIN | {"rms_norm_eps": 1e-5, "attention_bias": False},
    "olmo3": _PLAIN | {"rms_norm_eps": 1e-5, "attention_bias": False, "sliding_window": Maybe(int, 4096), "layer_types": Maybe(list)},
    "olmoe": _PLAIN | {
        "rms_norm_eps": 1e-5, "attention_bias": False, "clip_qkv": Maybe(float), "num_experts_per_tok": 8, "num_experts": 64,
        "norm_topk_prob": False,
    },
    "opt": {
        "vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "ffn_dim": int, "max_position_embeddings": int,
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, "word_embed_proj_dim": Maybe(int), "num_attention_heads": int,
        "activation_function": "relu", "enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
    },
    "phi": _BARE | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False},
    "phi3": _PLAIN | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "sliding_window": Maybe(int)},
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2 | {
        "num_key_value_heads": Maybe(int, 16), "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
        "mlp_only_layers": Maybe(list), "qkv_bias": True,
    },
    "qwen3": _QWEN2 | {"head_dim": 128, "attention_bias": False},
    "qwen3_moe": _QWEN | {
        "num_key_value_heads": 4, "attention_bias": False, "decoder_sparse_step": 1, "moe_intermediate_size": 768,
        "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False, "mlp_only_layers": Maybe(list),
    },
    "seed_oss": _LLAMA | {
        "num_key_value_heads": Maybe(int, 8), "head_dim": Maybe(int, 128), "attention_bias": True, "attention_out_bias": False,
        "mlp_bias": False,
    },
    "smollm3": _PLAIN | {
        "num_key_value_heads": Maybe(int, 4), "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "use_sliding_window": False, "sliding_window": Maybe(int), "no_rope_layers": Maybe(list), "no_rope_layer_interval": 4,
        "layer_types": Maybe(list),
    },
    "stablelm": _BARE | {
        "num_key_value_heads": 32, "layer_norm_eps": 1e-5, "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
    },
    "starcoder2": _BARE | {
        "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True, "sliding_window": Maybe(int),
        "tie_word_embeddings": True,
    },
}  # fmt: skip
SECTIONS: dict[str, dict[str, Any]] = {  # of a dbrx config.json
    "attn_config": {"clip_qkv": Maybe(_NUMBER), "kv_n_heads": 1},
    "ffn_config": {
        "ffn_act_fn": Maybe(dict), "ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1,
        "moe_normalize_expert_weights": Maybe(float, 1.0),
    },
}  # fmt: skip
_GPT_NAMES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
}  # fmt: skip
# Another spelling of a key, which wins where a file has both, as in transformers.
SPELLINGS = {
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    "dbrx": {"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers",
             "max_position_embeddings": "max_seq_len"},
    "falcon": {"n_embed": "hidden_size"},
    "gpt2": _GPT_NAMES,
    "gpt_bigcode": _GPT_NAMES,
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "glm4_moe": {"num_local_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "gptj": _GPT_NAMES,
    "mixtral": {"num_experts": "num_local_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}  # fmt: skip
ROPE_THETA: dict[str, Any] = {
    "cohere": 5e5, "ernie4_5": 5e5, "ernie4_5_moe": 5e5, "gemma3_text": {"global": 1e6, "local": 1e4}, "gpt_oss": 150000.0,
    "helium": 1e5, "mixtral": 1e6, "olmo3": 5e5, "smollm3": 2e6,
}  # fmt: skip; of the others:
ANY_ROPE_THETA = 1e4
