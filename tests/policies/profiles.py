"""Profiles of engines that do not exist."""

from __future__ import annotations

from rayneuron.engine.buckets import Capacity, capacity
from rayneuron.types import Profile


def engine(rows: int = 8, length: int = 1024, chunk: int = 256, block: int = 64, **more: object) -> Capacity:
    return capacity(rows=rows, length=length, chunk=chunk, block=block, **more)  # type: ignore[arg-type]


def profile(c: Capacity, chunk_ms: float = 0.0, output_tokens: float = 0.0, speed: float = 1.0) -> Profile:
    """Decode: 5 ms, 0.5 a row and 1 a 1,024 positions of each; prefill: 4 ms, 0.1 a token and 2 a 1,024 positions."""
    decode = tuple((b, n, (5 + 0.5 * b + b * n / 1024) / speed) for b in c.batch for n in c.lengths)
    prefill = tuple((1, t, n, (4 + 0.1 * t + 2 * n / 1024) / speed) for t in c.context for n in c.lengths)
    return Profile(
        batch=c.batch, lengths=c.lengths, context=c.context, prefix=c.prefix, chunk=c.chunk, decode=decode, prefill=prefill,
        tokens=((1, 5.0),), chunk_ms=chunk_ms, output_tokens=output_tokens,
    )  # fmt: skip
