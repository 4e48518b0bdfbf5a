"""NxD Inference's bucket lists and selection rules, two-dimensional ones included, as pure functions (research/neuron.md F1).

A prefix bucket is (prefill, prefix): new tokens by tokens already cached. Our own scheduler needs no prefix dimension, since its prefill
attends any length bucket; with `buckets.prefix` it keeps to these rules, the tail of the prefix computed again included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rayneuron.engine.buckets import Capacity, powers
from rayneuron.errors import CompileError, ConfigError

Fit = Literal["first", "second"]
SMALLEST, SMALLEST_PREFILL, SMALLEST_PREFIX_STEP = 128, 512, 256
_WHOLE = range(257, 513)  # contexts that are computed whole in the (512, 0) bucket: measured faster by NxD Inference


@dataclass(frozen=True, slots=True)
class PrefixFit:
    """The bucket of a prefill with a cached prefix, and how many of its cached tokens are computed again in the bucket's free places."""

    prefill: int
    prefix: int
    recomputed: int


def context_lengths(longest: int, bucketing: bool = True) -> list[int]:
    """Prefill buckets: powers of two from 128, the last the longest prompt; only that one without bucketing."""
    return powers(SMALLEST, longest) if bucketing else [longest]


def prefixes(said: Sequence[int] | str | None, longest: int) -> tuple[int, ...]:
    """`buckets.prefix` of a deployment: a list, or "auto" for NxD's powers of two from 512; empty where it says nothing."""
    if said is None:
        return ()
    return tuple(powers(SMALLEST_PREFILL, longest)) if isinstance(said, str) else tuple(said)


def chunk_fit(c: Capacity, new: int, cached: int) -> PrefixFit:
    """The bucket of a chunk of `new` tokens behind `cached` ones, of an engine with prefix buckets."""
    return select_prefix([(t, p) for t in c.context for p in c.prefix], new, cached)


def prefix_contexts(longest: int, prefill: Sequence[int] | None = None, prefix: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """(prefill, prefix) of prefills: each prefill with no prefix and with each prefix. Lists of one's own replace powers from 512."""
    rows = sorted(prefill) if prefill else powers(SMALLEST_PREFILL, longest)
    columns = [0, *(sorted(prefix) if prefix else powers(SMALLEST_PREFILL, longest))]
    if rows[-1] > longest:
        raise ConfigError(f"the largest prefill bucket {rows[-1]} is beyond the longest prompt {longest}")
    return [(t, p) for t in rows for p in columns]


def prefix_steps(longest: int, lengths: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """(1, prefix) of decode steps, powers from 256 or a list of one's own."""
    return [(1, n) for n in (sorted(lengths) if lengths else powers(SMALLEST_PREFIX_STEP, longest))]


def batch_steps(largest: int, batches: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(batch, length) of decode steps, largest batch first, the largest batch always among them."""
    if batches and max(batches) > largest:
        raise ConfigError(f"token_generation_batches goes to {max(batches)}, beyond the batch {largest}")
    return [(b, n) for b in sorted({*batches, largest}, reverse=True) for n in lengths]


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


def select_batch(buckets: Sequence[tuple[int, int]], rows: int, width: int, speculated: int = 0, truncate: bool = False) -> tuple[int, int]:
    """The smallest batch that holds `rows`, then its smallest length that holds `width` (equality is enough here)."""
    fitting = [b for b in buckets if rows <= b[0] and width + speculated <= b[1]]
    if fitting:
        return min(fitting)
    largest = max(buckets)
    if truncate and largest[0] >= rows:
        return largest
    raise CompileError(f"{rows} rows of {width + speculated} positions exceed the largest bucket {largest[0]} x {largest[1]}")


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


def select_prefix_step(
    buckets: Sequence[tuple[int, int]], queries: int, longest: int, speculated: int = 0, fit: Fit = "first", truncate: bool = False
) -> tuple[int, int]:
    """The decode bucket of a batch whose longest row has `longest` cached tokens: a prefix strictly larger, room for `queries`."""
    fitting = [i for i, (t, p) in enumerate(buckets) if p > longest + speculated and t >= queries]
    if not fitting:
        if truncate:
            return buckets[-1]
        raise CompileError(f"{queries} tokens behind {longest} exceed the largest bucket {buckets[-1]}")
    at = min(fitting, key=lambda i: buckets[i][1])
    return buckets[min(at + (fit == "second"), len(buckets) - 1)]
