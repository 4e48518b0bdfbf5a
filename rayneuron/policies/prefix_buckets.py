"""NxD Inference's rule for selecting a prefix bucket, (prefill, prefix): new tokens by tokens already cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rayneuron.errors import CompileError

_WHOLE = range(257, 513)  # contexts that are computed whole in the (512, 0) bucket: measured faster by NxD Inference


class PrefixFit(NamedTuple):
    """The bucket of a prefill with a cached prefix."""

    prefill: int
    prefix: int


def select_prefix(buckets: Sequence[tuple[int, int]], new: int, cached: int) -> PrefixFit:
    """The bucket of `new` tokens behind `cached` ones. CompileError where none holds them.

    The bucket's free places take the end of the prefix: NxD Inference computes that again there, here it only makes the prefix shorter,
    since T + P positions are attended either way.
    """
    rows, columns = sorted({t for t, _ in buckets}), sorted({p for _, p in buckets})
    if new + cached in _WHOLE and (512, 0) in buckets:
        return PrefixFit(512, 0)
    prefill = next((t for t in rows if t >= new), None)
    if prefill is None:
        raise CompileError(f"{new} new tokens exceed the largest prefill bucket {rows[-1]}")
    moved = min(cached, prefill - new)
    prefix = next((p for p in columns if p >= cached - moved), None)
    if prefix is None:
        raise CompileError(f"a prefix of {cached - moved} tokens exceeds the largest prefix bucket {columns[-1]}")
    return PrefixFit(prefill, prefix)
