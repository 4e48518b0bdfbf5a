"""NxD Inference's rules for selecting buckets, two-dimensional ones included, as pure functions.

A prefix bucket is (prefill, prefix): new tokens by tokens already cached. Our own scheduler needs no prefix dimension, since its prefill
attends any length bucket; with `buckets.prefix` it keeps to these rules, the tail of the prefix computed again included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rayneuron.engine.buckets import Capacity, powers
from rayneuron.errors import CompileError

Fit = Literal["first", "second"]
SMALLEST_PREFILL = 512
_WHOLE = range(257, 513)  # contexts that are computed whole in the (512, 0) bucket: measured faster by NxD Inference


@dataclass(frozen=True, slots=True)
class PrefixFit:
    """The bucket of a prefill with a cached prefix, and how many of its cached tokens are computed again in the bucket's free places."""

    prefill: int
    prefix: int
    recomputed: int


def prefixes(said: Sequence[int] | str | None, longest: int) -> tuple[int, ...]:
    """`buckets.prefix` of a deployment: a list, or "auto" for NxD's powers of two from 512; empty where it says nothing."""
    if said is None:
        return ()
    return tuple(powers(SMALLEST_PREFILL, longest)) if isinstance(said, str) else tuple(said)


def chunk_fit(c: Capacity, new: int, cached: int) -> PrefixFit:
    """The bucket of a chunk of `new` tokens behind `cached` ones, of an engine with prefix buckets."""
    return select_prefix([(t, p) for t in c.context for p in c.prefix], new, cached)


def select(buckets: Sequence[int], width: int, speculated: int = 0, fit: Fit = "first", truncate: bool = False) -> int:
    """The bucket of an attention mask `width` wide: strictly larger than needed, equal only for the last one.

    fit second: one further, so that a step in flight never meets a change of bucket. Raises CompileError unless `truncate`.
    """
    needed = width + speculated
    for i, bucket in enumerate(buckets):
        if fit == "first" and needed < bucket:
            return bucket
        if fit == "second" and width < bucket:
            return buckets[min(i + 1, len(buckets) - 1)]
    if needed == buckets[-1] or truncate:
        return buckets[-1]
    raise CompileError(f"{needed} positions exceed the largest bucket {buckets[-1]}")


def select_prefix(buckets: Sequence[tuple[int, int]], new: int, cached: int, block: int = 0, truncate: bool = False) -> PrefixFit:
    """The bucket of `new` tokens behind `cached` ones. The bucket's free places take the end of the prefix, which is computed again.

    `block`: tokens a block where the draft needs one more recomputed (EAGLE); only whole blocks move then.
    """
    rows, columns = sorted({t for t, _ in buckets}), sorted({p for _, p in buckets})
    if new + cached in _WHOLE and (512, 0) in buckets:
        return PrefixFit(512, 0, cached)
    needed = new + block
    prefill = next((t for t in rows if t >= needed), None)
    if prefill is None and not truncate:
        raise CompileError(f"{needed} new tokens exceed the largest prefill bucket {rows[-1]}")
    prefill = rows[-1] if prefill is None else prefill
    free = max(0, prefill - needed)
    moved = min(cached, free // block * block if block else free)
    prefix = next((p for p in columns if p >= cached - moved), None)
    if prefix is None:
        raise CompileError(f"a prefix of {cached - moved} tokens exceeds the largest prefix bucket {columns[-1]}")
    return PrefixFit(prefill, prefix, moved)
