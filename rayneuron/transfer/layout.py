"""How a pool's KV is cut over its workers, where two pools differ, and what one worker reads of another pool's; pure.

A unit is keys and values of one head of one block of one layer: what is read, whole, or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rayneuron.models.shard import head_plan, stage_layers

if TYPE_CHECKING:
    from rayneuron.devices.base import KvMemory
    from rayneuron.models.arch import Arch
    from rayneuron.models.kv import KvSpace

VERSION = 4  # raised with every change of a message or of what a unit holds
_EQUAL = ("version", "model", "dtype", "kv_dtype", "quantization", "block", "unit", "head_dim", "kv_heads", "layers", "rope", "shards")


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of one group. `unit`: bytes of one; `limit`: positions of the longest sequence; `shards`: ranks that share the positions of
    the same heads, by turns; `format`: the order of numbers within a unit; `numerics`: what may round differently.

    stages: layers of each pipeline stage, (first, end); heads: of each rank of a stage the source of every head it holds, -1 for zeros.
    """

    model: str
    dtype: str
    kv_dtype: str
    quantization: str
    block: int
    unit: int
    head_dim: int
    kv_heads: int
    layers: int
    rope: str
    limit: int
    shards: int
    format: str
    numerics: str
    stages: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, ...], ...]
    version: int = VERSION

    @property
    def workers(self) -> int:
        """Workers of the group; stage s has those from s x ranks on."""
        return len(self.stages) * len(self.heads)


class Run(msgspec.Struct, frozen=True):
    """Heads that lie side by side in both places."""

    there: int
    here: int
    count: int


class Reading(msgspec.Struct, frozen=True):
    """What one worker reads of one other: `count` layers from its layer `there` into ours from `here` on, some runs of heads of each block.
    `copies`: heads of ours that are the same as another of ours, (from, to), afterwards."""

    worker: int
    there: int
    here: int
    count: int
    runs: tuple[Run, ...]
    copies: tuple[tuple[int, int], ...] = ()


def layout_of(
    arch: Arch, space: KvSpace, memory: KvMemory, *, model: str, dtype: str, kv_dtype: str, quantization: str, numerics: str,
    ranks: int = 1, stages: int = 1, workers: int | None = None,
) -> KvLayout:  # fmt: skip
    """Of a group of `ranks` x `stages` that hold the KV of `arch`; `memory`: any worker's; `workers`: share the ranks of a stage evenly,
    each with the heads of its ranks side by side (None: a rank each)."""
    plan = head_plan(arch.heads, arch.kv_heads, ranks, arch.gqa, arch.sequence_shards)
    each = ranks // (workers or ranks)
    held = [stage_layers(arch.layers, stage, stages) for stage in range(stages)]
    return KvLayout(
        model=model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        block=space.block,
        unit=memory.units[0].shape[-1],
        head_dim=arch.head_dim,
        kv_heads=arch.kv_heads,
        layers=arch.layers,
        rope=repr((arch.position, arch.rope, arch.local_rope, arch.nope)),
        limit=space.limit,
        shards=arch.sequence_shards,
        format=memory.format,
        numerics=numerics,
        stages=tuple((layers.start, layers.stop) for layers in held),
        heads=tuple(tuple(head for rank in range(at, at + each) for head in plan.kv_of(rank)) for at in range(0, ranks, each)),
    )


def differences(mine: KvLayout, theirs: KvLayout) -> list[str]:
    """Why KV of `theirs`, a prefill pool's, cannot be used here; empty where it can."""
    found = [
        f"{name}: {getattr(mine, name)} here, {getattr(theirs, name)} there"
        for name in (*_EQUAL, "format")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if theirs.limit < mine.limit:
        found.append(f"limit: {mine.limit} here, {theirs.limit} there, which must be as long")
    for name, one in (("here", mine), ("there", theirs)):
        if [layer for first, end in one.stages for layer in range(first, end)] != list(range(one.layers)):
            found.append(f"stages: {one.stages} {name} are not the {one.layers} layers in order")
        missing = [source for source in range(one.kv_heads) for turn in range(one.shards) if not _owners(one, source, turn)]
        if missing or len({len(held) for held in one.heads}) != 1:
            found.append(f"heads: {one.heads} {name} are not equal parts of all {one.kv_heads} heads")
    return found


def reads(mine: KvLayout, stage: int, rank: int, theirs: KvLayout) -> list[Reading]:
    """What the worker of `stage` and `rank` reads. By source heads, never by the ratio of degrees: a source is read once, of one of those
    who have it, and who that is depends on the rank, so that copies share the work."""
    wanted: dict[int, list[int]] = {}  # source: our heads
    for here, source in enumerate(mine.heads[rank]):
        if source >= 0:
            wanted.setdefault(source, []).append(here)
    by_owner: dict[int, list[tuple[int, int]]] = {}  # rank there: (head there, head here)
    copies: dict[int, list[tuple[int, int]]] = {}
    for source, places in wanted.items():
        owners = _owners(theirs, source, rank % mine.shards)
        owner = owners[rank // mine.shards % len(owners)]
        by_owner.setdefault(owner, []).append((theirs.heads[owner].index(source), places[0]))
        copies.setdefault(owner, []).extend((places[0], other) for other in places[1:])
    first, end = mine.stages[stage]
    made = []
    for at, (start, stop) in enumerate(theirs.stages):
        low, high = max(first, start), min(end, stop)
        if low < high:
            made += [
                Reading(at * len(theirs.heads) + owner, low - start, low - first, high - low, _runs(pairs), tuple(copies[owner]))
                for owner, pairs in by_owner.items()
            ]
    return made


def zeros(mine: KvLayout, rank: int) -> list[int]:
    """Heads of a rank that pad: their blocks hold what others have left there."""
    return [here for here, source in enumerate(mine.heads[rank]) if source < 0]


def _owners(layout: KvLayout, source: int, turn: int) -> list[int]:
    """Ranks that hold a source head, of the given turn among those that share its positions."""
    return [rank for rank, held in enumerate(layout.heads) if source in held and rank % layout.shards == turn]


def _runs(pairs: list[tuple[int, int]]) -> tuple[Run, ...]:
    made: list[Run] = []
    for there, here in sorted(pairs):
        last = made[-1] if made else None
        if last is not None and (there, here) == (last.there + last.count, last.here + last.count):
            made[-1] = Run(last.there, last.here, last.count + 1)
        else:
            made.append(Run(there, here, 1))
    return tuple(made)
