"""The adapters one rank keeps on the host: read whole, cut to its share, packed for its device; by content."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from rayneuron.devices.base import Adapts, Device
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import adapted, lora
from rayneuron.models.adaptable import Module
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

    @property
    def places(self) -> Mapping[str, int] | None:
        """Where its slots were filled with the weights and stay as they are: which adapter lies in which."""

    def read(self, path: str, *, gently: bool = False) -> str:
        """Take an adapter's directory; what it is known by. Raises CheckpointError, and nothing is kept of it.

        `gently`: where it goes on beside steps, a little at a time.
        """

    def drop(self, identity: str) -> None:
        """Nobody needs it any more."""


class Shelf:
    """Of one rank: `modules` may have adapters, `how` cuts, `layers` are those it has."""

    beside, places = True, None

    def __init__(
        self, device: Device, arch: Arch, modules: Mapping[str, Module], how: Cut, layers: range, dtype: torch.dtype, *, slots: int,
        rank: int,
    ) -> None:  # fmt: skip
        if not isinstance(device, Adapts):
            raise ConfigError("this device has no room for adapters; leave lora out, and merge the adapter into the weights", param="lora")
        self._modules = modules
        device.open_adapters(arch, lora.sizes(modules, how, layers), slots, rank)
        self._device, self._arch, self._how = device, arch, how
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


class Resident:
    """As `Keeps`, on a device whose adapters are weights like others: they are written before it loads those, each into a slot of its own.
    `identities`: by path."""

    beside = True

    def __init__(
        self, ranks: Sequence[dict[str, Any]], arch: Arch, modules: Mapping[str, Module], hows: Sequence[Cut], layers: range,
        dtype: torch.dtype, *, slots: int, rank: int,
    ) -> None:  # fmt: skip
        """Make room in the weights of all local ranks, for which `hows` cut."""
        self._ranks, self._arch, self._modules, self._hows, self._layers = ranks, arch, modules, hows, layers
        self._dtype, self._rank = dtype, rank
        self.identities: dict[str, str] = {}
        self.places: dict[str, int] = {}
        there = {name: module for name, module in modules.items() if module.room}
        for weights, how in zip(ranks, hows, strict=True):
            each = zip(weights["layers"], lora.sizes(there, how, layers), strict=True)
            weights["layers"] = [adapted.tables(w, sizes, slots, rank, dtype) for w, sizes in each]
            weights["lora_rank"] = rank

    def fill(self, path: str) -> None:
        """Write an adapter's directory into the next slot, unless it is in one. Raises CheckpointError."""
        adapter = lora.read(Path(path), self._arch, self._modules, max_rank=self._rank)
        self.identities[path] = adapter.identity
        if adapter.identity in self.places:
            return
        slot = self.places[adapter.identity] = len(self.places)
        for weights, how in zip(self._ranks, self._hows, strict=True):
            adapted.put(weights["layers"], slot, self._rank, list(lora.cut(adapter, how, self._layers, self._dtype)))

    def filled(self) -> None:
        """That was the last; the device keeps the weights."""
        self._ranks, self._hows = (), ()

    @property
    def kept(self) -> frozenset[str]:
        """As `Keeps`."""
        return frozenset(self.places)

    def read(self, path: str, *, gently: bool = False) -> str:
        """As `Keeps`, of one that is there. Raises CheckpointError for another."""
        if path not in self.identities:
            raise CheckpointError(f"{path} is none of lora.lora_modules, and on this device no others are loaded while it runs")
        return self.identities[path]

    def drop(self, identity: str) -> None:
        """As `Keeps`: it stays in its slot."""


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
