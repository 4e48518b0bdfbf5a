"""Other weights for all ranks of a group: every rank reads its own share; all take them, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rayneuron.errors import CheckpointError
from rayneuron.group.messages import Adopted, Reweigh, Turn

if TYPE_CHECKING:
    from rayneuron.engine.runner import Runner
    from rayneuron.engine.swap import Swaps
    from rayneuron.group.rendezvous import Member
    from rayneuron.models import Progress


class Swapping:
    """As `engine.swap.Swaps`, on the engine's thread. `own`: worker 0's; `send` tells the others, `answers` are theirs."""

    def __init__(
        self, own: Swaps, members: Sequence[Member], send: Callable[[Reweigh | Turn], None], answers: Callable[[], list[Adopted]]
    ) -> None:  # fmt: skip
        self._own, self._members, self._send, self._answers = own, members, send, answers

    def check(self, path: str) -> str:
        """Of worker 0; the others look when they read."""
        return self._own.check(path)

    def read(self, path: str, identity: str) -> None:
        """All at once."""
        self._send(Reweigh(path, identity))
        wrong = []
        try:
            self._own.read(path, identity)
        except CheckpointError as own:
            wrong = [own.message]
        wrong += [f"{m.name}: {answer.wrong}" for m, answer in zip(self._members, self._answers(), strict=True) if answer.wrong]
        if wrong:
            raise CheckpointError(wrong[0])

    def turn(self) -> None:
        """Of all ranks, before their next step."""
        self._send(Turn())
        self._own.turn()

    def drop(self) -> None:
        """Of all ranks."""
        self._send(Turn(drop=True))
        self._own.drop()


def reweigh(runner: Runner | None, said: Reweigh, progress: Progress) -> Adopted:
    """Read other weights in another worker."""
    swap = runner.swap if runner is not None else None
    if swap is None:
        return Adopted("its device keeps the weights it began with")
    try:
        swap.read(said.path, said.identity, progress)
    except CheckpointError as wrong:
        return Adopted(wrong.message)
    return Adopted()


def turn(runner: Runner | None, said: Turn) -> None:
    """As worker 0 says."""
    if runner is not None and runner.swap is not None:
        (runner.swap.drop if said.drop else runner.swap.turn)()
