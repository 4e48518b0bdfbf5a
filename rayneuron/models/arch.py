"""What distinguishes one decoder from another, and nothing else.

E hidden size, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn into angles. `dim` is the rotated part of a head, `pairs` rotates neighbours (GPT-J) and not halves.

    `original` is the length the model was trained at before scaling, 0 where the kind has none. `scale` multiplies cos and sin.
    """

    kind: str = "default"
    dim: int = 0
    theta: float = 10000.0
    pairs: bool = False
    factor: float = 1.0
    original: int = 0
    scale: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low: float = 1.0
    high: float = 4.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Arch:
    """One decoder as data. Counts are those of the whole model, not of a rank."""

    model_type: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int = 0  # 0: no limit (alibi)
    act: str = "silu"  # a key of feedforward.ACTIVATIONS
    gated: bool = True  # gate/up/down, or up/down
    norm: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    post_norm: bool = False  # OPT-350m: normalise after the residual
    norms: Literal["before", "around", "after"] = "before"  # of what attention and feed-forward read; of what they add too; of that alone
    norm_offset: bool = False  # Gemma: a norm's weight counts from 1
    position: Literal["rope", "learned", "alibi"] = "rope"
    position_offset: int = 0  # OPT starts at 2
    rope: Rope = field(default_factory=Rope)
    local_rope: Rope | None = None  # of layers with a window, where it is another
    parallel: bool = False  # attention and feed-forward read the same residual
    one_norm: bool = False  # and the same norm of it (of Falcon, where both forms exist)
    windows: tuple[int, ...] = ()  # a sliding window a layer, 0: full attention; (): every layer is full
    nope: tuple[int, ...] = ()  # layers that rotate nothing, in a model with rope
    qk_norm: bool = False
    whole_qk_norm: bool = False  # queries and keys are normalised over all heads together (OLMo 2)
    clip_qkv: float = 0.0
    softcap_logits: float = 0.0
    softcap_scores: float = 0.0
    sinks: bool = False  # every query head has a score beside those of the positions, which takes its share and gives nothing
    logits_scale: float = 1.0  # logits are divided by it
    embed_scale: float = 1.0  # embeddings are multiplied with it, in the dtype of the residual
    attention_scale: float = 0.0  # 0: D ** -0.5
    embed: int = 0  # width of the embedding where it is not `hidden` (OPT-350m)
    norm_weights: bool = True  # False: norms without weight and bias
    final_norm: bool = True
    experts: int = 0
    top_k: int = 0
    renormalise: bool = True
    sigmoid: bool = False  # a router's scores are turned to shares one by one (GLM-4.5), else by softmax
    corrections: bool = False  # numbers of the experts are added to those where they are chosen, and not where they are mixed
    routed_scale: float = 1.0  # the sum of the chosen experts is multiplied with it
    dense_layers: tuple[int, ...] = ()  # layers of a mixture that are not one
    dense_ffn: int = 0
    swiglu_limit: float = 0.0  # what gate and up are clamped to, before up counts from 1 (GPT-OSS)
    expert_bias: bool = False  # experts and their router have biases
    shared_ffn: int = 0  # of the expert every token has beside its own
    shared_gate: bool = False  # which is weighted by a router of its own (Qwen2-MoE)
    capacity_factor: float | None = None  # None: no token is ever dropped
    tied: bool = False
    biased: tuple[str, ...] = ()  # which of q k v o gate up down have a bias, where a family leaves it open
    gqa: str | None = None  # a sharding strategy by name; None: chosen by shard.head_plan
    joined: int = 0  # EAGLE: what `fc` reads
    spoken: int = 0  # EAGLE-3: ids the head knows, where it does not know all
    doubled: bool = False  # EAGLE-3: attention reads an embedding beside the hidden state
    sequence_shards: int = 1  # ranks one KV group is split over by position (flash decoding)

    @property
    def scale(self) -> float:
        """What query-key products are multiplied with."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def uncommon(self) -> str:
        """What of a layer no device's fused form knows, "" where it is all common: such layers run operation by operation."""
        known = {
            "norms of what is added": self.norms != "before", "norms over all heads": self.whole_qk_norm,
            "soft-capped scores": self.softcap_scores > 0, "attention sinks": self.sinks, "two kinds of rope": self.local_rope is not None,
            "a shared expert": self.shared_ffn > 0, "a router of another kind": self.sigmoid or self.corrections or self.routed_scale != 1,
        }  # fmt: skip
        return ", ".join(name for name, has in known.items() if has)

    def window(self, layer: int) -> int:
        """The sliding window of one layer, 0 where attention is full."""
        return self.windows[layer] if self.windows else 0
