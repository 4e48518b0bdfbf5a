"""Instance types as data: devices, cores, memory, legal TP degrees, links, network, host.

Sources: AWS Neuron SDK 2.32 documentation and the instance pages, read 2026-08; a device is a chip.
trn2.3xlarge is not in that documentation. TP degrees: the feature guide's list (Inf2 1 2 4 8 24, Trn1 1 2 8 16 32, Trn2 1 2 4 8 16 32 64);
two more, which only some documents have, carry a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from rayneuron.errors import ConfigError

GIB = 2**30
MACHINE = "this machine"  # name of an instance that counts no cores
Links = Literal["none", "ring", "torus"]
_TORUS_SIDE = 4  # all published tori are 4 x 4


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance type. `cores_per_device` is physical; `lnc` physical cores make one logical core, which is what all else counts.

    `notes` maps a TP degree that only some documents list to what they say. `tp_across_nodes`: one TP group may span nodes.
    """

    name: str
    family: str
    devices: int
    cores_per_device: int
    device_memory_bytes: int
    vcpus: int
    host_memory_bytes: int
    degrees: tuple[int, ...]
    links: Links = "none"
    efa: int = 0
    lnc: int = 1
    lncs: tuple[int, ...] = (1,)
    tp_across_nodes: bool = False
    notes: Mapping[int, str] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[int, ...]:
        """The sizes whose runs packing keeps whole: the legal ones, or the powers of two where every size is legal."""
        return self.degrees if len(self.degrees) < self.cores else tuple(d for d in self.degrees if d & (d - 1) == 0)

    @property
    def cores(self) -> int:
        """Logical cores of the node."""
        return self.devices * self.cores_per_device // self.lnc

    @property
    def core_memory_bytes(self) -> int:
        """Device memory of one logical core."""
        return self.device_memory_bytes * self.lnc // self.cores_per_device

    def neighbours(self, device: int) -> tuple[int, ...]:
        """Devices linked to `device`, ascending."""
        if self.links == "ring":
            return tuple(sorted({(device - 1) % self.devices, (device + 1) % self.devices}))
        if self.links == "torus":
            row, column = divmod(device, _TORUS_SIDE)
            beside = {row * _TORUS_SIDE + (column + step) % _TORUS_SIDE for step in (-1, 1)}
            return tuple(sorted(beside | {(device + step * _TORUS_SIDE) % self.devices for step in (-1, 1)}))
        return ()

    def check_degree(self, tensor_parallel: int) -> str | None:
        """Refuse a TP degree this instance's collectives do not know; returns a note where the documents disagree. Raises ConfigError."""
        if tensor_parallel in self.degrees:
            return self.notes.get(tensor_parallel)
        allowed = ", ".join(map(str, self.degrees))
        below = max((d for d in self.degrees if d < tensor_parallel), default=self.degrees[0])
        raise ConfigError(
            f"tensor_parallel {tensor_parallel} is not possible on {self.name} ({self.cores} cores): allowed are {allowed}; "
            f"write tensor_parallel: {below}",
            param="tensor_parallel",
        )

    def logical(self, lnc: int) -> Instance:
        """The same machine with `lnc` physical cores to a logical one. Raises ConfigError."""
        if lnc not in self.lncs:
            allowed = " or ".join(map(str, self.lncs))
            raise ConfigError(f"logical core config {lnc} is not possible on {self.name}; write {allowed}", param="instance")
        if lnc == self.lnc:
            return self
        made = replace(self, lnc=lnc)
        return replace(made, degrees=_degrees(made.cores, _TRN2))  # what has a choice of them is a Trn2


_TRN2 = (1, 2, 4, 8, 16, 32, 64)


def _degrees(cores: int, listed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in listed if d <= cores)


def _inf2(size: str, devices: int, vcpus: int, host_gib: int) -> Instance:
    cores = 2 * devices
    notes = {12: "TP 12 on Inf2 is in AWS' calculator list but not in its feature guide"}
    return Instance(
        f"inf2.{size}", "inf2", devices, 2, 32 * GIB, vcpus, host_gib * GIB, _degrees(cores, (1, 2, 4, 8, 12, 24)),
        links="ring" if devices > 1 else "none", notes={d: n for d, n in notes.items() if d <= cores},
    )  # fmt: skip


def _trn1(name: str, devices: int, vcpus: int, host_gib: int, efa: int) -> Instance:
    cores = 2 * devices
    notes = {4: "TP 4 on Trn1 needs Neuron runtime 2.23 or newer (adjacent groups of four); older ones say 'unsupported topology'"}
    return Instance(
        name, "trn1", devices, 2, 32 * GIB, vcpus, host_gib * GIB, _degrees(cores, (1, 2, 4, 8, 16, 32)),
        links="torus" if devices > 1 else "none", efa=efa, tp_across_nodes=efa > 0, notes={d: n for d, n in notes.items() if d <= cores},
    )  # fmt: skip


def _trn2(name: str, devices: int, vcpus: int, host_gib: int, efa: int) -> Instance:
    return Instance(
        name, "trn2", devices, 8, 96 * GIB, vcpus, host_gib * GIB, _degrees(4 * devices, _TRN2),
        links="torus" if devices > 1 else "none", efa=efa, lnc=2, lncs=(2, 1), tp_across_nodes=efa > 0,
    )  # fmt: skip


INSTANCES: Mapping[str, Instance] = MappingProxyType(
    {
        i.name: i
        for i in (
            _inf2("xlarge", 1, 4, 16),
            _inf2("8xlarge", 1, 32, 128),
            _inf2("24xlarge", 6, 96, 384),
            _inf2("48xlarge", 12, 192, 768),
            _trn1("trn1.2xlarge", 1, 8, 32, efa=0),
            _trn1("trn1.32xlarge", 16, 128, 512, efa=8),
            _trn1("trn1n.32xlarge", 16, 128, 512, efa=16),
            _trn2("trn2.3xlarge", 1, 12, 128, efa=0),
            _trn2("trn2.48xlarge", 16, 192, 2048, efa=16),
            _trn2("trn2u.48xlarge", 16, 192, 2048, efa=16),
        )
    }
)


def instance(name: str) -> Instance:
    """The instance type of that name, "trn2.48xlarge" or "trn2.48xlarge:lnc1"; "cores:4" is a CPU box that declares four cores.

    Raises ConfigError listing the names.
    """
    name, _, suffix = name.partition(":")
    if name == "cores" and suffix.isdigit():
        return declared(int(suffix), int(suffix))
    found = INSTANCES.get(name)
    if found is None:
        raise ConfigError(f"unknown instance {name!r}; known are {', '.join(INSTANCES)}", param="instance")
    if suffix:
        if not (suffix.startswith("lnc") and suffix[3:].isdigit()):
            raise ConfigError(f"{suffix!r} after {name}: write {name}:lnc1 or {name}:lnc2", param="instance")
        return found.logical(int(suffix[3:]))
    return found


def declared(cores: int, vcpus: int) -> Instance:
    """A node that merely counts cores (a CPU box with Ray resource `neuron_cores`): any TP degree up to `cores`. Raises ConfigError."""
    if cores < 1:
        raise ConfigError(f"a node with {cores} declared cores can run nothing; declare at least 1", param="instance")
    every = tuple(range(1, cores + 1))
    return Instance(f"{cores} declared cores", "declared", cores, 1, 16 * GIB, vcpus, 0, every, tp_across_nodes=True)


def machine(ranks: int, vcpus: int, memory_bytes: int) -> Instance:
    """A plain machine that counts no cores, as a place for `ranks` ranks that share its memory."""
    every = tuple(range(1, ranks + 1))
    return Instance(MACHINE, "declared", ranks, 1, memory_bytes, vcpus, memory_bytes, every, tp_across_nodes=True)
