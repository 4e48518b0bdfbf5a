"""The language family files are written in: names of ours to names of theirs, and every canonical tensor's shape and cut; no torch.

A rule maps our names to theirs: `"q.w": "attn.q_proj.weight"`, or `(name, function)` where one of theirs becomes several of ours
(`"q.w k.w v.w"`). `{e}` in theirs stands for every expert. Functions return views where they can, so that nothing is copied before a
rank's part is cut out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rayneuron.models.arch import Arch

if TYPE_CHECKING:
    from torch import Tensor

Convert = Callable[["Tensor"], Any]
Rules = dict[str, "str | tuple[str, Convert]"]
Unit = Literal["query heads", "KV heads", "equal parts"]

PRODUCTS = frozenset(  # what is quantised where a model is
    {"q.w", "k.w", "v.w", "o.w", "gate.w", "up.w", "down.w", "shared_gate.w", "shared_up.w", "shared_down.w"}
)

WIDE = frozenset({"corrections.w"})  # float32, whatever is computed in

FUSED: Mapping[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # what reads its input once


def same(t: Tensor) -> Tensor:
    """The tensor as it is stored."""
    return t


def all_experts(t: Tensor) -> Tensor:
    """The same, of all experts in one tensor."""
    return t


def both(names: Mapping[str, str], biased: Iterable[str] | None = None) -> Rules:
    """Weight and bias of each: {"q": "attn.q_proj"} -> {"q.w": "attn.q_proj.weight", "q.b": ...}; `biased`: which have one."""
    out: Rules = {f"{n}.w": f"{theirs}.weight" for n, theirs in names.items()}
    return out | {f"{n}.b": f"{theirs}.bias" for n, theirs in names.items() if biased is None or n in biased}


def interleaved(a: Arch) -> Convert:
    """Fused rows grouped by head as (q k v) (BLOOM, GPT-NeoX) to three."""
    return lambda t: tuple(x.flatten(0, 1) for x in t.unflatten(0, (a.heads, 3, -1)).unbind(1))


def stacked(a: Arch) -> Convert:
    """Fused rows as all q, all k, all v (GPT-2, DBRX, Phi-3) to three."""
    sizes = (a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim)
    return lambda t: tuple(t.split(sizes, 0))


def grouped(a: Arch) -> Convert:
    """Fused rows as the queries of a KV head, its key, its value, one KV head after the other (Falcon, BLOOM's where all have one)."""

    def split(t: Tensor) -> tuple[Tensor, ...]:
        heads = t.unflatten(0, (a.kv_heads, a.heads // a.kv_heads + 2, -1))
        return tuple(heads[:, part].flatten(0, 2) for part in (slice(None, -2), slice(-2, -1), slice(-1, None)))

    return split


def halves(t: Tensor) -> tuple[Tensor, ...]:
    """Fused rows as all of gate, all of up (Phi-3) to two."""
    return t.chunk(2)


def shape_of(a: Arch, name: str, ffn: int) -> tuple[int, ...]:
    """The whole shape of a canonical tensor (of one expert). `ffn`: the inner size of the layer it belongs to."""
    q, kv, h, e = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden, a.embed or a.hidden
    read = 2 * h if a.doubled else h
    shapes: dict[str, tuple[int, ...]] = {
        "q.w": (q, read), "k.w": (kv, read), "v.w": (kv, read), "q.b": (q,), "k.b": (kv,), "v.b": (kv,), "o.w": (h, q), "gate.w": (ffn, h),
        "up.w": (ffn, h), "down.w": (h, ffn), "gate.b": (ffn,), "up.b": (ffn,), "router.w": (a.experts, h), "q_norm.w": (a.head_dim,),
        "k_norm.w": (a.head_dim,), "embed.w": (a.vocab, e), "head.b": (a.vocab,), "project_in.w": (h, e),
        "project_out.w": (e, h), "position.w": (a.max_positions + a.position_offset, h), "q_norms.w": (q,), "k_norms.w": (kv,),
        "sinks.w": (q,), "shared_gate.w": (a.shared_ffn, h), "shared_up.w": (a.shared_ffn, h), "shared_down.w": (h, a.shared_ffn),
        "shared_router.w": (1, h), "router.b": (a.experts,), "corrections.w": (a.experts,), "fc.w": (h, a.joined),
        "head.w": (a.spoken or a.vocab, e),
    }  # fmt: skip
    if name.startswith("block"):  # of a Medusa head
        return (h, h) if name.endswith(".w") else (h,)
    return shapes.get(name, (h,))  # norms, and biases of what returns to the residual


def cut_of(name: str) -> tuple[Unit, int] | None:
    """How ranks share a canonical tensor (a weight, a bias, or a scale for every row): in which units, along which dimension.

    None: every rank holds all of it. Dimensions of feed-forward weights count from the end, as experts may be stacked before them.
    """
    layer, _, kind = name.removeprefix("shared_").rpartition(".")
    if layer in ("q", "q_norms", "sinks") or (layer == "o" and kind == "w"):
        return "query heads", 1 if layer == "o" else 0
    if layer in ("k", "v", "k_norms"):
        return "KV heads", 0
    if layer in ("embed", "head"):
        return "equal parts", 0
    if layer in ("gate", "up") and kind == "b":
        return "equal parts", -1
    if layer in ("gate", "up"):
        return "equal parts", -2
    return ("equal parts", -1) if (layer, kind) == ("down", "w") else None


def entering(name: str) -> bool:
    """Whether a tensor outside the layers belongs before them, on the first stage; the others belong behind, on the last."""
    return name.startswith(("embed", "position", "project_in"))
