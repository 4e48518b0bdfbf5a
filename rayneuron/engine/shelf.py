"""The adapters one rank keeps on the host: read whole, cut to its share, packed for its device; by content."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from rayneuron.devices.base import Adapts, Device
from rayneuron.errors import ConfigError
from rayneuron.models import lora
from rayneuron.models.arch import Arch
from rayneuron.models.weights import Cut

SLICE_S, SHARE = 0.0003, 0.15  # of a core: how long a piece of work beside steps may be, and how much it takes all in all


class Keeps(Protocol):
    """What the engine needs of it: one rank's, or those of a group."""

    @property
    def beside(self) -> bool:
        """Whether `read` may go on while steps run; else it is the engine's thread that reads."""

    @property
    def kept(self) -> frozenset[str]:
        """What it holds."""

    def read(self, path: str, *, gently: bool = False) -> str:
        """Take an adapter's directory; what it is known by. Raises CheckpointError, and nothing is kept of it.

        `gently`: where it goes on beside steps, a little at a time.
        """

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
        self._device, self._arch, self._how = device, arch, how
        self._modules = lora.modules_of(arch, family)
        self._layers, self._dtype, self._rank = layers, dtype, rank
        self._kept: dict[str, Any] = {}
        self._lock = threading.Lock()  # one is read at a time: each needs its own size in memory twice

    @property
    def kept(self) -> frozenset[str]:
        """As `Keeps`; for any thread."""
        return frozenset(self._kept)

    def read(self, path: str, *, gently: bool = False) -> str:
        """As `Keeps`; for any thread."""
        with self._lock, torch.inference_mode(), alone(gently) as rest:
            adapter = lora.read(Path(path), self._arch, self._modules, max_rank=self._rank, rest=rest)
            if adapter.identity not in self._kept:
                made = lora.cut(adapter, self._how, self._layers, self._dtype, rest)
                self._kept[adapter.identity] = self._device.pack_adapter(made, rest)
        return adapter.identity

    def drop(self, identity: str) -> None:
        """As `Keeps`."""
        self._kept.pop(identity, None)

    def install(self, slots: Sequence[tuple[int, str]]) -> None:
        """Have slots hold adapters, between two steps."""
        for slot, identity in slots:
            self._device.put_adapter(slot, self._kept[identity])


@contextmanager
def alone(gently: bool) -> Iterator[Callable[[], None]]:
    """What to call after every little piece of work. `gently`: then it sleeps as long as it has to, and the work has this thread only.

    A low priority would not do: who has it keeps the interpreter's lock while others take the processor, and steps wait for the lock.
    """
    threads, since = torch.get_num_threads(), time.thread_time()

    def rest() -> None:
        nonlocal since
        worked = time.thread_time() - since
        if worked >= SLICE_S:
            time.sleep(worked * (1 / SHARE - 1))
            since = time.thread_time()

    torch.set_num_threads(1 if gently else threads)
    try:
        yield rest if gently else lambda: None
    finally:
        torch.set_num_threads(threads)
