"""A checkpoint read name by name, remembering what was read, so that nothing is left out unseen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rayneuron.errors import CheckpointError


@dataclass(slots=True)
class Reader:
    """A checkpoint read name by name, remembering what was read. `base` is put before names of checkpoints saved without it."""

    checkpoint: Mapping[str, Tensor]
    base: str = ""
    used: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bare = self.base and not any(n.startswith(self.base) for n in self.checkpoint)
        self.names = {(self.base + n if bare and not n.startswith(("lm_head.", "score.")) else n): n for n in self.checkpoint}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def take(self, name: str) -> Tensor:
        """The tensor, marked as read. Raises CheckpointError naming a missing one."""
        if name not in self.names:
            raise CheckpointError(f"tensor {name!r} is missing from the checkpoint, which holds {len(self.names)} others")
        self.used.add(name)
        return self.checkpoint[self.names[name]]

    def release(self, name: str) -> None:
        """Give the pages of a mapped tensor back."""
        give = getattr(self.checkpoint, "release", None)
        if give is not None and name in self.names:
            give(self.names[name])

    def unread(self, ignore: tuple[str, ...], further: tuple[str, ...] = ()) -> list[str]:
        """Names nothing has read and no suffix in `ignore` excuses, nor a prefix in `further`."""
        return [n for n in self.names if n not in self.used and not n.endswith(ignore) and not n.startswith(further)]
