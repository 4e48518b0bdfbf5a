"""The adapters one rank keeps on the host: read whole, cut to its share, packed for its device; by content."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from rayneuron.devices.base import Adapts, Device
from rayneuron.errors import ConfigError
from rayneuron.models import lora
from rayneuron.models.arch import Arch
from rayneuron.models.weights import Cut


class Keeps(Protocol):
    """What the engine needs of it: one rank's, or those of a group."""

    @property
    def beside(self) -> bool:
        """Whether `read` may go on while steps run; else it is the engine's thread that reads."""

    @property
    def kept(self) -> frozenset[str]:
        """What it holds."""

    def read(self, path: str) -> str:
        """Take an adapter's directory; what it is known by. Raises CheckpointError, and nothing is kept of it."""

    def drop(self, identity: str) -> None:
        """Nobody needs it any more."""


class Shelf:
    """Of one rank: `how` cuts, `layers` are those it has."""

    beside = True

    def __init__(
        self, device: Device, arch: Arch, family: ModuleType, how: Cut, layers: range, dtype: torch.dtype, *, slots: int, rank: int
    ) -> None:
        if not isinstance(device, Adapts):
            raise ConfigError("this device has no room for adapters; leave lora out, and merge the adapter into the weights", param="lora")
        device.open_adapters(arch, lora.sizes(arch, family, how, layers), slots, rank)
        self._device, self._arch, self._family, self._how = device, arch, family, how
        self._layers, self._dtype, self._rank = layers, dtype, rank
        self._kept: dict[str, Any] = {}
        self._lock = threading.Lock()  # one is read at a time: each needs its own size in memory twice

    @property
    def kept(self) -> frozenset[str]:
        """As `Keeps`; for any thread."""
        return frozenset(self._kept)

    def read(self, path: str) -> str:
        """As `Keeps`; for any thread."""
        with self._lock, torch.inference_mode():
            adapter = lora.read(Path(path), self._arch, self._family, max_rank=self._rank)
            if adapter.identity not in self._kept:
                made = lora.cut(adapter, self._how, self._layers, self._dtype)
                self._kept[adapter.identity] = self._device.pack_adapter(made)
        return adapter.identity

    def drop(self, identity: str) -> None:
        """As `Keeps`."""
        self._kept.pop(identity, None)

    def install(self, slots: Sequence[tuple[int, str]]) -> None:
        """Have slots hold adapters, between two steps."""
        for slot, identity in slots:
            self._device.put_adapter(slot, self._kept[identity])
