"""Other weights of the same model for one rank of a running engine: read beside its own, then taken between two steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rayneuron.devices.base import Reweighs, Weights
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import Progress


class Swaps(Protocol):
    """What the engine needs of it: one rank's, or those of a group."""

    def check(self, path: str) -> str:
        """What the weights of a directory are known by (`hashing.fingerprint`). Raises CheckpointError where they are another model's."""

    def read(self, path: str, identity: str) -> None:
        """Have them beside the others. Raises CheckpointError, and nothing is kept, where they are wrong or known by another name."""

    def turn(self) -> None:
        """Go on with those beside, and have the others there."""

    def drop(self) -> None:
        """Let go of those beside."""


class Swap:
    """Of one rank: `check` as `Swaps`, `load` reads its share of a directory."""

    def __init__(self, device: Reweighs, check: Callable[[Path], str], load: Callable[[Path, Progress], Weights]) -> None:
        self._device, self._check, self._load = device, check, load

    def check(self, path: str) -> str:
        """As `Swaps`; for any thread."""
        try:
            return self._check(Path(path))
        except OSError as wrong:
            raise CheckpointError(f"{path} cannot be read: {wrong}") from None

    def read(self, path: str, identity: str, progress: Progress = lambda done, total: None) -> None:
        """As `Swaps`."""
        if self.check(path) != identity:
            raise CheckpointError(f"{path} holds other weights here than elsewhere, or they have changed meanwhile")
        try:
            weights = self._load(Path(path), progress)
        except (ConfigError, OSError) as wrong:
            raise CheckpointError(f"{path} cannot be taken: {wrong}") from None
        self._device.stage_weights(weights)

    def turn(self) -> None:
        """As `Swaps`."""
        self._device.turn_weights()

    def drop(self) -> None:
        """As `Swaps`."""
        self._device.drop_weights()


def exchange(swap: Swaps, path: str, identity: str, sound: Callable[[], None]) -> None:
    """Read, turn, and see with `sound` that what comes out is one: else it goes on as before. Raises CheckpointError."""
    try:
        swap.read(path, identity)
        swap.turn()
        try:
            sound()
        except CheckpointError:
            swap.turn()
            raise
    finally:
        swap.drop()
