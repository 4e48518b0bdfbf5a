"""Memory of one rank by arithmetic on config.json: weights, KV, bucket scratch. No torch, so that planning takes no time.

The parameter counts are those of models/ (a test compares every family, at every degree and stage, with what the loader really allocates).
B rows, T new tokens, L attended, H heads, D head size, E hidden, F inner size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayneuron.config import Deployment
from rayneuron.engine.buckets import Capacity, prefill_sizes
from rayneuron.errors import CheckpointError, ConfigError

MIB = 2**20
# What the runtime keeps on each core beside tensors: code of the loaded graphs, DMA rings, collectives' buffers. Inferred, not measured.
RUNTIME_BYTES = 512 * MIB
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_SMALL = 1  # int8, f8e4m3, f8e5m2


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family has that its config.json does not say: gated feed-forward, biases, norms (vectors a layer), learned positions."""

    gated: bool = False
    biased: tuple[str, ...] = ()
    norm_bias: bool = True
    layer_norms: int = 2
    qk_norm: bool = False
    embed_norm: bool = False
    position_offset: int | None = None  # rows of the position table beyond the model's positions; None: no table
    head_bias: bool = False


_GPT = Traits(biased=("q", "k", "v", "o", "up", "down"), position_offset=0)
_LLAMA = Traits(gated=True, norm_bias=False)
FAMILIES: Mapping[str, Traits] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Traits(gated=True, norm_bias=False, biased=("q", "k", "v")),
    "qwen3": Traits(gated=True, norm_bias=False, qk_norm=True),
    "qwen3_moe": Traits(gated=True, norm_bias=False, qk_norm=True),
    "dbrx": _LLAMA,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "opt": Traits(biased=_GPT.biased, position_offset=2),
    "bloom": Traits(biased=_GPT.biased, embed_norm=True),
    "gpt_neox": Traits(biased=_GPT.biased),
    "gptj": Traits(biased=("up", "down"), layer_norms=1, head_bias=True),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of one model that its memory follows from; counts of the whole model."""

    traits: Traits
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    embed: int
    positions: int
    experts: int
    dense_layers: frozenset[int]
    dense_ffn: int
    biased: tuple[str, ...]
    norm_weights: bool
    final_norm: bool
    tied: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes one core holds. `scratch`: the largest step's activations; `runtime`: a fixed reserve."""

    weights: int
    kv: int
    scratch: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.scratch + self.runtime


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Read config.json of any family in `FAMILIES`. Raises CheckpointError naming what is missing."""
    kind = str(config.get("model_type"))
    traits = FAMILIES.get(kind)
    if traits is None:
        raise CheckpointError(f"model_type {kind!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    attn, ffn = config.get("attn_config") or {}, config.get("ffn_config") or {}
    hidden, heads = (
        _first(config, "hidden_size", "n_embd", "n_embed", "d_model"),
        _first(config, "num_attention_heads", "n_head", "n_heads"),
    )
    layers = _first(config, "num_hidden_layers", "n_layer", "n_layers")
    experts = _maybe(config, "num_local_experts", "num_experts") or ffn.get("moe_num_experts", 4 if kind == "dbrx" else 0)
    inner = _maybe(config, "intermediate_size", "ffn_dim", "n_inner") or ffn.get("ffn_hidden_size") or 4 * hidden
    plain = kind == "opt" and (config.get("do_layer_norm_before", True) is False or config.get("_remove_final_layer_norm", False))
    return Sizes(
        traits=traits,
        vocab=_first(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(config, kind, attn, heads),
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=config.get("moe_intermediate_size") or inner if experts else inner,
        embed=config.get("word_embed_proj_dim") or hidden,
        positions=0
        if traits.position_offset is None
        else _first(config, "max_position_embeddings", "n_positions") + traits.position_offset,
        experts=experts,
        dense_layers=_dense_layers(config, layers) if kind == "qwen3_moe" else frozenset(),
        dense_ffn=inner,
        biased=_biased(config, traits),
        norm_weights=bool(config.get("layer_norm_elementwise_affine", True)),
        final_norm=not plain,
        tied=bool(config.get("tie_word_embeddings", kind in ("gpt2", "gpt_bigcode", "opt", "bloom"))),
    )


def head_counts(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """(query, KV) heads a rank holds, padding and copies included (NxD's rules, as models/shard.head_plan). Raises ConfigError."""
    if ranks > heads:
        raise ConfigError(
            f"tensor_parallel {ranks} is more than the model's {heads} attention heads; write tensor_parallel: {heads} or less",
            param="tensor_parallel",
        )
    if kv_heads % ranks == 0:
        return heads // ranks, kv_heads // ranks
    if ranks % kv_heads == 0:
        return -(-(heads // kv_heads) // (ranks // kv_heads)), 1
    return -(-heads // ranks), -(-heads // ranks)


def parameters(s: Sizes, ranks: int = 1, layers: range | None = None, *, first: bool = True, last: bool = True) -> tuple[int, int, int]:
    """(products, others, output channels) of one rank: elements that may be quantised, elements that never are, scales they then need."""
    products = others = channels = 0
    for layer in layers if layers is not None else range(s.layers):
        more = _layer(s, ranks, layer)
        products, others, channels = products + more[0], others + more[1], channels + more[2]
    vocab, norm = -(-s.vocab // ranks), s.hidden * (2 if s.traits.norm_bias else 1) * s.norm_weights
    if first:
        others += vocab * s.embed + s.positions * s.hidden + (norm if s.traits.embed_norm else 0)
    if last:
        others += (norm if s.final_norm else 0) + (vocab if s.traits.head_bias else 0)
        others += 0 if s.tied and first else vocab * s.embed
    others += (s.embed != s.hidden) * s.embed * s.hidden * (first + last)
    return products, others, channels


def _layer(s: Sizes, ranks: int, layer: int) -> tuple[int, int, int]:
    q, kv = (n * s.head_dim for n in head_counts(s.heads, s.kv_heads, ranks))
    dense = not s.experts or layer in s.dense_layers
    inner, copies = -(-(s.ffn if not s.experts or not dense else s.dense_ffn) // ranks), 1 if dense else s.experts
    wide = ("gate", "up") if s.traits.gated else ("up",)
    outputs = {"q": q, "k": kv, "v": kv, "o": s.hidden, "down": s.hidden} | dict.fromkeys(wide, inner)
    products = (2 * q + 2 * kv) * s.hidden + copies * (len(wide) + 1) * inner * s.hidden
    others = sum(outputs[name] for name in s.biased if name in outputs and dense)
    others += s.traits.layer_norms * s.hidden * (2 if s.traits.norm_bias else 1) * s.norm_weights
    others += (0 if dense else s.experts * s.hidden) + (2 * s.head_dim if s.traits.qk_norm else 0)
    return products, others, q + 2 * kv + s.hidden + copies * (len(wide) * inner + s.hidden)


def memory(
    config: Deployment, raw: Mapping[str, Any], capacity: Capacity, ranks: int, layers: range, *, first: bool = True, last: bool = True
) -> Memory:
    """What one rank of one stage holds. The weights and KV are exact, the scratch an upper bound for plain (unfused) attention."""
    s = sizes(raw)
    width = _BYTES[dtype(config.dtype, raw)]
    products, others, channels = parameters(s, ranks, layers, first=first, last=last)
    quantised = config.quantization is not None or (raw.get("quantization_config") or {}).get("quant_method") == "rayneuron"
    weights = products * (_SMALL if quantised else width) + others * width + (4 * channels if quantised else 0)
    kv_heads = head_counts(s.heads, s.kv_heads, ranks)[1]
    kv_width = _SMALL if config.kv_dtype else width
    # One scratch row and column more than sequences and positions (engine/runner.py).
    kv = 2 * (capacity.rows + 1) * kv_heads * (capacity.length + 1) * s.head_dim * len(layers) * kv_width
    return Memory(weights, kv, _scratch(s, capacity, ranks, width, last))


def _scratch(s: Sizes, c: Capacity, ranks: int, width: int, last: bool) -> int:
    q, kv = head_counts(s.heads, s.kv_heads, ranks)
    inner = -(-max(s.ffn, s.dense_ffn) // ranks)
    most = 0
    for rows, tokens in [*prefill_sizes(c), *((b, 1) for b in c.batch)]:
        new = rows * tokens
        attention = new * (q + 2 * kv) * s.head_dim * width + new * q * c.length * 4
        step = 3 * new * s.hidden * width + max(attention, 3 * new * inner * width)
        logits = 4 * s.vocab * (rows if rows > 1 or tokens > c.scores else new) if last else 0  # every token's for prompt logprobs
        most = max(most, step + logits)
    return most


def dtype(name: str, raw: Mapping[str, Any]) -> str:
    """The compute dtype of `dtype: auto`: fp32 where the checkpoint is, else bf16."""
    if name != "auto":
        return name
    stored = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return "fp32" if stored == "float32" else "bf16"


def _kv_heads(config: Mapping[str, Any], kind: str, attn: Mapping[str, Any], heads: int) -> int:
    if kind == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else heads
    if kind == "dbrx":
        return int(attn.get("kv_n_heads", 1))
    return int(config.get("num_key_value_heads") or heads)


def _biased(config: Mapping[str, Any], traits: Traits) -> tuple[str, ...]:
    kind = config["model_type"]
    if kind == "opt":
        return traits.biased if config.get("enable_bias", True) else ()
    if kind == "gpt_neox":
        return traits.biased if config.get("attention_bias", True) else ("up", "down")
    if traits.gated and kind not in ("qwen2", "dbrx"):
        return ("q", "k", "v", "o") * bool(config.get("attention_bias")) + ("gate", "up", "down") * bool(config.get("mlp_bias"))
    return traits.biased


def _dense_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    step, only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return frozenset(i for i in range(layers) if i in only or (i + 1) % step)


def _maybe(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _first(config: Mapping[str, Any], *names: str) -> int:
    found = _maybe(config, *names)
    if not found:
        raise CheckpointError(f"config.json of a {config.get('model_type', '?')} model lacks {names[0]!r}")
    return found
