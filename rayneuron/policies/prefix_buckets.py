"""NxD Inference's rule for selecting a prefix bucket, (prefill, prefix): new tokens by tokens already cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayneuron.errors import CompileError

_WHOLE = range(257, 513)  # contexts that are computed whole in the (512, 0) bucket: measured faster by NxD Inference


@dataclass(frozen=True, slots=True)
class PrefixFit:
    """The bucket of a prefill with a cached prefix, and how many cached tokens count among its new ones: NxD Inference computes them
    again in the bucket's free places, here they only make the prefix shorter, since T + P positions are attended either way."""

    prefill: int
    prefix: int
    recomputed: int


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
