"""KV over sockets: one blocking thread a stream, bytes received where they belong, each piece behind a header of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rayneuron.devices.base import KvMemory, KvRuns
from rayneuron.transfer.base import Damaged, Pull, Receipt
from rayneuron.transfer.dialogue import Dialogue
from rayneuron.transfer.pieces import carry, digest, segments

STREAM_BYTES = 8 << 20  # from which more than one stream pays


class Sockets:
    """Connections to one worker of a prefill pool, `streams` of them for what is long."""

    def __init__(self, addresses: Sequence[str], token: bytes, stall_s: float, streams: int = 2) -> None:
        self._talks = [Dialogue(addresses, token, stall_s) for _ in range(streams)]

    def pull(self, want: Pull, into: KvMemory, stop: threading.Event) -> Receipt:
        """As `Transport`."""
        read = want.read
        heads = sum(run.count for run in read.runs)
        size = read.count * heads * (want.end - want.first) * into.units[0].shape[-1]
        streams = min(len(self._talks), read.count) if size >= STREAM_BYTES else 1
        shares = [(read.there + read.count * i // streams, read.there + read.count * (i + 1) // streams) for i in range(streams)]
        if streams == 1:
            _receive(self._talks[0], want, shares[0], into, stop)
            return Receipt(size, "sockets")
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
        return Receipt(size, "sockets")

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
    """Layers `part` (first, end) of theirs."""
    unit, read = into.units[0].shape[-1], want.read
    layers = (part[0], part[1] - part[0])
    ours = into.units[read.here : read.here + read.count]
    heads = {run.there: run.here for run in read.runs}
    sums = {run.there: (into.carry or carry)(KvRuns(ours, want.blocks, run.here, run.count), None) for run in read.runs}
    with talk.begun(want, layers):
        for piece in talk.pieces(want, unit, layers):
            check = talk.head(want, piece, piece.blocks * piece.heads * unit, stop)
            at = piece.first - want.first
            blocks = want.blocks[at : at + piece.blocks]
            talk.receive_into(segments(ours, piece.layer - read.there, heads[piece.head], piece.heads, blocks), stop)
            if digest(sums[piece.head](*piece.within(want.first, want.end, read.there))) != check:
                raise Damaged(f"piece {piece.number} is not what was sent")
