"""What a call needs of an engine, and who takes what it gives; in this process or elsewhere."""

from __future__ import annotations

from typing import Protocol

from rayneuron.types import Delta, Request, Snapshot, TokenDelta


class Takes(Protocol):
    """What tokens become: text (`text.assembler.Assembler`), or a frame for a gateway, which has none to return (`serve.peer`)."""

    def push(self, delta: TokenDelta) -> Delta | None: ...


class Computes(Protocol):
    """What calls are handed to: `engine.loop.EngineLoop`, or `gateway.remote.RemoteEngine` where it is elsewhere.

    `submit` raises only what this process knows (RequestError, Busy, NotReady); everything else is the first event of the flight.
    """

    error: str | None

    @property
    def alive(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def snapshot(self) -> Snapshot: ...

    def pending(self) -> bool: ...

    def close(self) -> None: ...


PIPE = "rayneuron.pipe"  # where a request's `state` has one


class Pipe(Protocol):
    """The body of one answer: parts of it go to the connection at once, with no task that waits."""

    @property
    def open(self) -> bool:
        """Whether a part can be written now: the head is out, the end is not, the client is there, and reads."""

    def write(self, part: bytes) -> None:
        """Write a part, which holds something."""
