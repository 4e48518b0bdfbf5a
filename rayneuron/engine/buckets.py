"""Static shapes: list all that will ever run, and choose one for a step.

Shapes: B rows, T new tokens, L attended positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any, Literal

from rayneuron.devices.base import LIKELIEST, LOGITS, NOTHING, POOLED, SAMPLED, SCORES, Shape, Want
from rayneuron.errors import CompileError, ConfigError
from rayneuron.models.kv import KvSpace
from rayneuron.policies.prefix_buckets import select_prefix

SMALLEST_CONTEXT, SMALLEST_LENGTH = 32, 128  # new tokens and attended positions of the smallest graph, where nothing else is said
LONG = 4096  # positions from which on sizes are finer: over so many, what a step takes is mostly attention, and grows as both of them do
SMALLEST_PREFIXED = 512  # new tokens with prefix buckets, as NxD Inference has it
EVERY = {want: replace(want, at="all") for want in (LIKELIEST, SAMPLED, LOGITS)}  # the same of all new tokens
Drafts = Literal["", "model", "heads"]
FEW_CONTEXT, FEW_LENGTH = 128, 2048  # the smallest where every graph is minutes of compiling


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one engine can hold, in rows and tokens, and the bucket lists that follow from it (each sorted, the maximum included).

    rows: sequences at once; length: positions of a sequence; chunk: most new tokens of a prefill step; scores: the same for a prefill
    whose every logit is wanted; blocks, block: the KV of all, and the positions of one; wants: what there are graphs for; prefix: where
    not empty, a prefill of T new tokens has a graph for each of these numbers of tokens before it, 0 among them, instead of one for each
    length; verify: new tokens of a row in a step that verifies drafts, 0 where none does; drafts: what makes some in a step, if anything.
    """

    rows: int
    length: int
    chunk: int
    scores: int
    blocks: int
    block: int
    batch: tuple[int, ...]
    context: tuple[int, ...]
    lengths: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    prefix: tuple[int, ...] = ()
    wants: tuple[Want, ...] = (LIKELIEST, SAMPLED, LOGITS, SCORES, POOLED)
    verify: int = 0
    drafts: Drafts = ""

    @property
    def holds_all(self) -> bool:
        """Whether there is KV for all rows at their longest, so that nobody is ever preempted."""
        return self.blocks >= self.rows * -(-self.length // self.block)

    @property
    def space(self) -> KvSpace:
        """How its KV is numbered."""
        return KvSpace(self.rows, self.length, self.blocks, self.block)


def powers(low: int, high: int) -> list[int]:
    """NxD Inference's rule: powers of two from `low` up to `high`, the last being `high` itself (autobucketing.generate_buckets)."""
    if low >= high:
        return [high]
    return [2**i for i in range(int(log2(low)), round(log2(high)))] + [high]


def fours(low: int, high: int, least: int = 1) -> list[int]:
    """`high`, and at every fourth the powers of two below it down to `low`; `least` sizes if there are so many."""
    sizes, size = [high], 2 ** (high.bit_length() - 3) if high > 3 else 0
    while size and (size >= low or len(sizes) < least):
        sizes.append(size)
        size //= 4
    return sorted(sizes)


def halfway(sizes: Sequence[int], low: int) -> list[int]:
    """Sizes, powers of two but for the last, and from `low` on those half way to the next."""
    return sorted({*sizes, *(size + size // 2 for size in sizes if low <= size and size + size // 2 < sizes[-1])})


def prefixes(said: Sequence[int] | str | None, longest: int) -> tuple[int, ...]:
    """`buckets.prefix` of a deployment: a list, or "auto" for NxD's powers of two from 512; empty where it says nothing."""
    if said is None:
        return ()
    return tuple(powers(SMALLEST_PREFIXED, longest)) if isinstance(said, str) else tuple(said)


def capacity(
    *,
    rows: int,
    length: int,
    chunk: int,
    kv_tokens: int | None = None,
    block: int | None = None,
    batch: Sequence[int] | None = None,
    context: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    smallest: int | None = None,
    smallest_context: int | None = None,
    prefill_rows: Sequence[int] = (1, 2, 4),
    scores: int = 128,
    prefix: Sequence[int] = (),
    few: bool = False,
    wants: Sequence[Want] | None = None,
    verify: int = 0,
    drafts: Drafts = "",
) -> Capacity:
    """Fill in the lists nobody gave. Raises ConfigError where a list or budget contradicts a maximum. block: None for one block a row.

    `few`: for devices where a graph is minutes of compiling: one output kind, prefill and decode of one row and decode of all, sizes by
    fours. With `prefix`, a prefill is of one row, as NxD Inference's prefix caching has it; 0 and the maximum are always in the list.
    """
    chunk = min(chunk, length)
    if context and max(context) > length:
        raise ConfigError(f"buckets.context_encoding goes to {max(context)}, beyond max_model_len {length}")
    if prefix and max(prefix) > length:
        raise ConfigError(f"buckets.prefix goes to {max(prefix)}, beyond max_model_len {length}")
    if batch and max(batch) > rows:
        raise ConfigError(f"buckets.batch goes to {max(batch)}, beyond max_num_seqs {rows}")
    block = min(block or length, length)
    full = rows * -(-length // block)
    if block < length and (block < 16 or block & (block - 1)):  # kernels read 16 positions at once, and shift and mask slots
        raise ConfigError(f"block_size {block} is no power of two from 16; write one, or {length} for one block a row")
    if kv_tokens is not None and kv_tokens < block:
        raise ConfigError(f"kv_cache_tokens must hold a block of {block} tokens, got {kv_tokens}; write more, or a smaller block_size")
    context, lengths = _sizes(length, chunk, context, lengths, smallest, smallest_context, few)
    if few:
        prefill_rows, batch = (1,), batch or (1,)
    return Capacity(
        rows=rows,
        length=length,
        chunk=max(context),
        scores=max((t for t in context if t <= scores), default=context[0]),
        blocks=full if kv_tokens is None else min(kv_tokens // block, full),
        block=block,
        batch=tuple(sorted({*(batch or powers(1, rows)), rows})),
        context=context,
        lengths=lengths,
        prefill_rows=(1,) if prefix else tuple(r for r in sorted({*prefill_rows, 1}) if r <= rows),
        prefix=tuple(sorted({0, *prefix, length})) if prefix else (),
        wants=tuple(wants or ((LOGITS,) if few else (LIKELIEST, SAMPLED, LOGITS, SCORES, POOLED))),
        verify=verify,
        drafts=drafts,
    )


def _sizes(
    length: int, chunk: int, context: Sequence[int] | None, lengths: Sequence[int] | None, smallest: int | None,
    smallest_context: int | None, few: bool,
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """New tokens and attended positions of a capacity's graphs."""
    if few:
        lengths = lengths or fours(smallest or FEW_LENGTH, length, least=2)
        context = context or fours(smallest_context or FEW_CONTEXT, chunk)
    elif length > LONG:  # the smallest prefill takes about as long over all positions as the usual one over LONG
        lengths = lengths or halfway(powers(smallest or SMALLEST_LENGTH, length), LONG)
        if smallest_context is None:
            context = context or halfway(powers(max(2, SMALLEST_CONTEXT * LONG // length), chunk), 2)
    context = context or powers(smallest_context or SMALLEST_CONTEXT, chunk)
    return tuple(sorted({*context})), tuple(sorted({*(lengths or powers(smallest or SMALLEST_LENGTH, length)), length}))


def smaller(c: Capacity, **changes: Any) -> Capacity:
    """A capacity with fewer rows or shorter ones, and no more KV than they need."""
    made = replace(c, **changes)
    block = min(c.block, made.length)
    return replace(made, block=block, blocks=min(c.blocks, made.rows * -(-made.length // block)))


def prefill_sizes(c: Capacity) -> list[tuple[int, int]]:
    """Every (rows, tokens) of a prefill step: no more new tokens than one full row of the largest context bucket."""
    return [(r, t) for r in c.prefill_rows for t in c.context if r * t <= c.chunk]


def inventory(c: Capacity) -> list[Shape]:
    """All graphs of one engine. Prefill attends every length bucket that can hold its tokens; all scores exist for one row only."""
    made: list[Shape] = []
    for want in c.wants:
        for rows, tokens in prefill_sizes(c):
            if want == SCORES and (rows > 1 or tokens > c.scores):
                continue
            made += [Shape("prefill", rows, tokens, n, want) for n in _reach(c, tokens)]
        if want.ids is not None:
            made += [Shape("decode", b, 1, n, want) for b in c.batch for n in c.lengths]
        if want.ids is not None and c.verify:
            made += [Shape("verify", b, c.verify, n, EVERY[want]) for b in c.batch for n in c.lengths]
    for rows, tokens in prefill_sizes(c) if c.drafts == "model" else ():
        made += [Shape("fill", rows, tokens, n, NOTHING) for n in _reach(c, tokens)]
    return made


def _reach(c: Capacity, tokens: int) -> tuple[int, ...]:
    if c.prefix:
        return tuple(sorted({min(tokens + p, c.length) for p in c.prefix}))
    # A step uses this context bucket only with more new tokens than the bucket below holds, so shorter lengths never occur.
    below = c.context[bisect_left(c.context, tokens) - 1] if tokens > c.context[0] else 0
    return c.lengths[bisect_left(c.lengths, below + 1) :]


def at_least(sizes: Sequence[int], wanted: int, what: str) -> int:
    """The smallest bucket that holds `wanted`. Raises CompileError beyond the last."""
    at = bisect_left(sizes, wanted)
    if at == len(sizes):
        raise CompileError(f"no {what} bucket holds {wanted}; the largest is {sizes[-1]}")
    return sizes[at]


def decode_shape(c: Capacity, rows: int, length: int, want: Want) -> Shape:
    """The graph for one new token of each of `rows` sequences, the longest attending `length` positions."""
    return Shape("decode", at_least(c.batch, rows, "batch"), 1, at_least(c.lengths, length, "sequence length"), want)


def verify_shape(c: Capacity, rows: int, length: int, want: Want) -> Shape:
    """The graph for one new token and some drafts of each of `rows` sequences, the furthest attending `length` positions."""
    return Shape("verify", at_least(c.batch, rows, "batch"), c.verify, at_least(c.lengths, length, "sequence length"), EVERY[want])


def prefill_shape(c: Capacity, counts: Sequence[int], length: int, want: Want) -> Shape:
    """The graph for `counts[i]` new tokens of row i, the furthest attending `length` positions."""
    rows = at_least(c.prefill_rows, len(counts), "prefill row")
    if c.prefix:
        fit = select_prefix([(t, p) for t in c.context for p in c.prefix], counts[0], length - counts[0])
        return Shape("prefill", rows, fit.prefill, min(fit.prefill + fit.prefix, c.length), want)
    return Shape("prefill", rows, at_least(c.context, max(counts), "context"), at_least(c.lengths, length, "sequence length"), want)


def fill_shape(c: Capacity, counts: Sequence[int], length: int) -> Shape:
    """The graph by which a draft model reads `counts[i]` tokens of row i."""
    return replace(prefill_shape(c, counts, length, NOTHING), tag="fill")


def pack_prefill(c: Capacity, remaining: Sequence[int], most: int) -> list[int]:
    """How many new tokens of each waiting prefill, in order, one step should take: `most` (at least the smallest bucket) in all its rows.

    The first sequence is always served. Others join it when that computes fewer padded tokens than serving each alone would:
    rows are padded to the largest count's bucket and to a row bucket.
    """
    counts = remaining[: c.prefill_rows[-1]]
    first = min(counts[0], most)
    if len(counts) < 2:
        return [first]
    best, best_waste = [first], _padded(c, [first]) / first
    for rows in c.prefill_rows[1:]:
        widest = max((t for t in c.context if rows * t <= most), default=0)
        if first > widest:
            break
        group = [min(n, widest) for n in counts[:rows]]
        waste = _padded(c, group) / sum(group)
        if waste <= best_waste * 1.0001:
            best, best_waste = group, waste
    return best


def _padded(c: Capacity, counts: Sequence[int]) -> int:
    return at_least(c.prefill_rows, len(counts), "prefill row") * at_least(c.context, max(counts), "context")
