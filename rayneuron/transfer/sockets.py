"""KV over sockets: one blocking thread a stream, bytes received where they belong, each piece behind a header of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from rayneuron.devices.base import KvMemory, KvRuns
from rayneuron.transfer.base import Damaged, Pull
from rayneuron.transfer.dialogue import Dialogue
from rayneuron.transfer.pieces import at_once, carry, digest

STREAM_BYTES = 8 << 20  # from which more than one stream pays


class Sockets:
    """Connections to one worker of a prefill pool, `streams` of them for what is long."""

    def __init__(self, addresses: Sequence[str], token: bytes, stall_s: float, streams: int = 2) -> None:
        self._talks = [Dialogue(addresses, token, stall_s) for _ in range(streams)]

    def pull(self, want: Pull, into: KvMemory, stop: threading.Event) -> int:
        """As `Transport`."""
        read = want.read
        heads = sum(run.count for run in read.runs)
        size = read.count * heads * (want.end - want.first) * into.units[0].shape[-1]
        streams = min(len(self._talks), read.count) if size >= STREAM_BYTES else 1
        shares = [(read.there + read.count * i // streams, read.there + read.count * (i + 1) // streams) for i in range(streams)]
        if streams == 1:
            _receive(self._talks[0], want, shares[0], into, stop)
            return size
        wrong: list[BaseException] = []
        halt = _Both(stop)
        threads = [
            threading.Thread(target=_guarded, args=(wrong, halt, talk, want, part, into), name="rayneuron-stream", daemon=True)
            for talk, part in zip(self._talks, shares, strict=False)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if wrong:
            raise wrong[0]
        return size

    def close(self) -> None:
        """As `Transport`."""
        for talk in self._talks:
            talk.close()


class _Both(threading.Event):
    """Set with another one, or alone."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()


def _guarded(wrong: list[BaseException], halt: threading.Event, talk: Dialogue, want: Pull, part: tuple[int, int], into: KvMemory) -> None:
    try:
        _receive(talk, want, part, into, halt)
    except Exception as problem:
        wrong.append(problem)
        halt.set()


def _receive(talk: Dialogue, want: Pull, part: tuple[int, int], into: KvMemory, stop: threading.Event) -> None:
    """Layers `part` (first, end) of theirs. A piece lands in memory that stays in the processor's cache, whence it is hashed and copied in
    one pass: each byte of `into` is written once, and read by nobody."""
    unit, read, n = into.units[0].shape[-1], want.read, want.end - want.first
    layers = (part[0], part[1] - part[0])
    ours, how = into.units[read.here : read.here + read.count], into.carry or carry
    landings, carried = {}, {}
    for run in read.runs:
        each = at_once(n, run.count * unit)
        landings[run.there] = landing = np.empty((each, run.count, unit), np.uint8)
        landed = KvRuns([landing] * read.count, [i % each for i in range(n)], 0, run.count)
        carried[run.there] = how(landed, KvRuns(ours, want.blocks, run.here, run.count))
    with talk.begun(want, layers):
        for piece in talk.pieces(want, unit, layers):
            check = talk.head(want, piece, piece.blocks * piece.heads * unit, stop)
            talk.receive_into([landings[piece.head][: piece.blocks]], stop)
            if digest(carried[piece.head](*piece.within(want.first, want.end, read.there))) != check:
                raise Damaged(f"piece {piece.number} is not what was sent")
