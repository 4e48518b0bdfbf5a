"""The adapters of a group: every rank reads the directory itself and keeps its own share; all or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rayneuron.errors import CheckpointError
from rayneuron.group.messages import Adopt, Adopted, Disown

if TYPE_CHECKING:
    from rayneuron.engine.shelf import Keeps
    from rayneuron.group.rendezvous import Member


class Adopting:
    """As `engine.shelf.Keeps`. `own`: worker 0's; `send` tells the others, `answers` are theirs. They hear of adapters where they hear of
    steps, so it is the engine's thread that reads."""

    beside = False

    def __init__(
        self, own: Keeps, members: Sequence[Member], send: Callable[[Adopt | Disown], None], answers: Callable[[], list[Adopted]]
    ) -> None:  # fmt: skip
        self._own, self._members, self._send, self._answers = own, members, send, answers

    @property
    def places(self) -> Mapping[str, int] | None:
        """As worker 0's: all have filled their slots in the same order."""
        return self._own.places

    @property
    def kept(self) -> frozenset[str]:
        """Of all ranks."""
        return self._own.kept

    def read(self, path: str, *, gently: bool = False) -> str:
        """Steps wait for it in any case. What is wrong with it is found here, before the others hear of it."""
        before, identity = self._own.kept, self._own.read(path)
        self._send(Adopt(path, identity))
        for member, answer in zip(self._members, self._answers(), strict=True):
            if answer.wrong:
                if identity not in before:
                    self.drop(identity)
                raise CheckpointError(f"{member.name}: {answer.wrong}")
        return identity

    def drop(self, identity: str) -> None:
        """Of all ranks."""
        self._own.drop(identity)
        self._send(Disown(identity))


def adopt(shelf: Keeps | None, said: Adopt) -> Adopted:
    """Read an adapter in another worker: it has to be the very one that worker 0 has read."""
    if shelf is None:
        return Adopted("it has no room for adapters")
    before = shelf.kept
    try:
        identity = shelf.read(said.path)
    except CheckpointError as wrong:
        return Adopted(wrong.message)
    if identity == said.identity:
        return Adopted()
    if identity not in before:
        shelf.drop(identity)
    return Adopted(f"{said.path} holds another adapter there")
