"""Rotary positions: the frequencies of every known kind (`rope`), and the cos/sin tables of one step.

B rows, T new tokens, R rotated half (dim / 2). Formulas: the papers of each kind as transformers' `modeling_rope_utils` writes them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rayneuron.models.arch import Arch, Rope


def frequencies(rope: Rope) -> Tensor:
    """Radians a position, float32 [R]. For `dynamic` those of the trained length."""
    steps = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    freq = 1.0 / rope.theta**steps
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**steps)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, freq)
    return _llama3_frequencies(rope, freq) if rope.kind == "llama3" else freq


def _yarn_frequencies(rope: Rope, freq: Tensor) -> Tensor:
    def turns(count: float) -> float:  # the dimension that makes `count` turns over the trained length
        return rope.dim * math.log(rope.original / (count * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turns(rope.beta_fast), turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return freq / rope.factor * ramp + freq * (1 - ramp)


def _llama3_frequencies(rope: Rope, freq: Tensor) -> Tensor:
    wave = 2 * math.pi / freq
    smooth = ((rope.original / wave - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return (1 - smooth) * freq / rope.factor + smooth * freq


def tables(arch: Arch, freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B,T,1,R] of one step. positions int32 [B,T]; freq of `frequencies`, a constant among the weights.

    `dynamic` scales by each token's own position, so a token's rotation never depends on its neighbours or on chunking:
    the numbers of transformers fed one token at a time.
    """
    rope, at = arch.rope, positions.float()[..., None]
    if rope.kind == "dynamic":
        length = (at + 1).clamp(min=rope.original)
        grown = rope.theta * ((rope.factor * length / rope.original) - (rope.factor - 1)) ** (rope.dim / (rope.dim - 2))
        freq = 1.0 / grown ** (torch.arange(0, rope.dim, 2, dtype=torch.float32, device=freq.device) / rope.dim)
    angle = (at * freq)[:, :, None]
    return (angle.cos() * rope.scale).to(dtype), (angle.sin() * rope.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool = False) -> Tensor:
    """Turn the first 2R of every head of x [B,T,H,D] by cos, sin [B,T,1,R]; the rest passes."""
    half = cos.shape[-1]
    turn = x if x.shape[-1] == 2 * half else x[..., : 2 * half]
    if pairs:
        a, b = turn[..., ::2], turn[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turn[..., :half], turn[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return out if turn is x else torch.cat((out, x[..., 2 * half :]), -1)
