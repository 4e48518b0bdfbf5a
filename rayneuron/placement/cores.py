"""Which cores a node has and how they are written: neuron-ls, declared instances, NEURON_RT_VISIBLE_CORES."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayneuron.devices.neuron.releases import VISIBLE, parse_visible
from rayneuron.devices.neuron.words import PRESENT
from rayneuron.errors import ConfigError
from rayneuron.placement.instances import INSTANCES, Instance, declared, instance
from rayneuron.policies.packing import compact

COUNT = "NEURON_RT_NUM_CORES"
NOSET = "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES"
NEURON_LS = "opt/aws/neuron/bin/neuron-ls"
_TEN_S, _MOST_CORES = 10.0, 64  # the latter of a device: none has more


@dataclass(frozen=True, slots=True)
class Chip:
    """One device as neuron-ls lists it. `cores` counts logical cores, `ids` are their numbers on the node; `users`: pids and commands of
    processes whose runtime uses it.

    `linked`, `lnc` and `ids` are empty on versions that do not say.
    """

    device: int
    cores: int
    memory_bytes: int
    linked: tuple[int, ...] = ()
    lnc: int | None = None
    ids: tuple[int, ...] = ()
    users: tuple[tuple[int, str], ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The node's numbers of its cores: as said, else as where every device before it has as many."""
        return self.ids if len(self.ids) == self.cores else tuple(range(self.device * self.cores, (self.device + 1) * self.cores))


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a node before its instance type is. `ray_cores`: Ray resource `neuron_cores` of the node."""

    named: str | None = None
    chips: tuple[Chip, ...] = ()
    product: str | None = None
    ray_cores: int | None = None
    vcpus: int = 1


def parse_neuron_ls(text: str) -> tuple[Chip, ...]:
    """`neuron-ls --json-output` of any version seen, in device order. Raises ConfigError where it is no such output."""
    try:
        listed = json.loads(text[text.index("[") :]) if "[" in text else None
        if not isinstance(listed, list):
            raise ValueError("no JSON list")
        chips = tuple(sorted((_chip(entry) for entry in listed), key=lambda chip: chip.device))
        _check_list(chips)
        return chips
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise ConfigError(f"neuron-ls printed something else than a list of devices ({problem}): {text.strip()[:120]!r}") from None


def _check_list(chips: Sequence[Chip]) -> None:
    """Raise ValueError for devices that cannot be those of one node."""
    if any(chip.device < 0 or not 0 < chip.cores <= _MOST_CORES or min(chip.numbers) < 0 for chip in chips):
        raise ValueError("a device without number or cores")
    if len({(chip.cores, chip.memory_bytes, chip.lnc) for chip in chips}) > 1:
        raise ValueError("devices of several kinds")
    numbers = [core for chip in chips for core in chip.numbers]
    if len({chip.device for chip in chips}) < len(chips) or len(set(numbers)) < len(numbers):
        raise ValueError("a device or core that is listed twice")


def _chip(entry: Mapping[str, Any]) -> Chip:
    lnc, processes = entry.get("logical_neuroncore_config"), entry.get("neuron_processes") or ()
    return Chip(
        device=int(entry["neuron_device"]),
        cores=int(entry["nc_count"]),
        memory_bytes=int(entry["memory_size"]),
        linked=tuple(sorted(int(d) for d in entry.get("connected_to") or ())),
        lnc=None if lnc is None else int(lnc),
        ids=tuple(sorted(int(core) for core in entry.get("neuroncore_ids") or ())),
        users=tuple((int(p["pid"]), str(p.get("command"))) for p in processes if p.get("neuron_runtime_version") != "NA"),  # it only looks
    )


def detect(facts: Facts) -> Instance:
    """The node's instance type. Order: devices that are there, the `instance:` of the configuration, the DMI product name, Ray's count.

    A named instance that contradicts the devices, and a Ray count larger than the instance, are refused. Raises ConfigError.
    """
    wanted = instance(facts.named) if facts.named else None
    if facts.chips:
        found = _identify(facts, wanted)
    elif wanted is not None:
        found = wanted
    elif facts.product and facts.product in INSTANCES:
        found = INSTANCES[facts.product]
    elif facts.ray_cores:
        return declared(facts.ray_cores, facts.vcpus)
    else:
        raise ConfigError(
            "no Neuron device here and no instance named; write `instance: inf2.48xlarge` (or another type) in the deployment file, "
            "or start Ray with --resources '{\"neuron_cores\": N}'",
            param="instance",
        )
    if facts.ray_cores is not None and facts.ray_cores > found.cores:
        raise ConfigError(
            f"Ray counts {facts.ray_cores} neuron_cores on this node but {found.name} has {found.cores}; start Ray with {found.cores}"
        )
    return found


def _identify(facts: Facts, wanted: Instance | None) -> Instance:
    """A container may be given some of a node's devices: a type with more than are shown fits too, though one with as many fits better."""
    chips = facts.chips
    fits = [kind for kind in _fitting(chips) if _linked_as(kind, chips)] or _fitting(chips)
    seen = f"{len(chips)} devices of {chips[0].cores} cores and {chips[0].memory_bytes / 2**30:.0f} GiB"
    if wanted is not None:
        if (wanted.name, wanted.lnc) not in {(kind.name, kind.lnc) for kind in fits}:
            raise ConfigError(
                f"the configuration names {wanted.name} but neuron-ls shows {seen}; remove `instance:` or correct it", param="instance"
            )
        return wanted
    if not fits:
        raise ConfigError(f"neuron-ls shows {seen}, which is no instance type known here; known are {', '.join(INSTANCES)}")
    named = [kind for kind in fits if kind.name == facts.product]
    return (named or sorted(fits, key=lambda kind: (kind.devices > len(chips), abs(kind.vcpus - facts.vcpus))))[0]


def _fitting(chips: Sequence[Chip]) -> list[Instance]:
    """The types that have these devices, or these among more."""
    lnc, fits = chips[0].lnc, []
    for kind in INSTANCES.values():
        close = abs(kind.device_memory_bytes - chips[0].memory_bytes) < kind.device_memory_bytes // 4
        for size in kind.lncs if lnc is None else (lnc,):
            if size in kind.lncs and close and kind.cores_per_device // size == chips[0].cores and chips[-1].device < kind.devices:
                fits.append(kind.logical(size))
    return fits


def _linked_as(kind: Instance, chips: Sequence[Chip]) -> bool:
    return all(set(chip.linked) <= set(kind.neighbours(chip.device)) for chip in chips)


def left(kind: Instance, chips: Sequence[Chip], said: str | None) -> frozenset[int]:
    """The cores of a node that are ours to give: of the devices that are there (`chips`, none where nobody can say), those the operator
    left us (`said`: NEURON_RT_VISIBLE_CORES as this program was started with). Raises ConfigError for a list of none or of others."""
    present = frozenset(core for chip in chips for core in chip.numbers) or frozenset(range(kind.cores))
    if said is None:
        return present
    if not said.strip():
        raise ConfigError(
            f"{VISIBLE} is empty: Ray reads that as no core and the runtime as all {kind.cores}; unset it, or write {compact(present)}",
            param=VISIBLE,
        )
    cores = frozenset(parse_visible(visible(parse_visible(said))))  # one run, or refused
    if not cores <= present:
        where = f"{kind.name} has cores {compact(present)}" + (" in this container" if len(present) < kind.cores else "")
        raise ConfigError(f"{VISIBLE}={said} names cores {compact(cores - present)}, but {where}", param=VISIBLE)
    return cores


def left_here(kind: Instance, said: str | None, root: Path = Path("/")) -> frozenset[int]:
    """`left` of this machine; where its devices are of another type (a plan made elsewhere), as if it had none. Raises ConfigError.

    An image without neuron-ls still shows the files of the devices that a pod or `docker run --device` was given.
    """
    chips = probe(root)[0]
    if not chips and kind.name in INSTANCES:
        seen = [Chip(number, kind.cores // kind.devices, kind.device_memory_bytes) for number in _device_files(root)]
        return left(kind, [chip for chip in seen if chip.device < kind.devices], said)
    known = any((kind.name, kind.lnc) == (fit.name, fit.lnc) for fit in (_fitting(chips) if chips else ()))
    return left(kind, chips if known else (), said)


def _device_files(root: Path) -> list[int]:
    """Numbers of the devices whose files are here. A pod's may have been renamed, but the minor number is the device's."""
    found = set()
    for file in (root / "dev").glob("neuron[0-9]*"):
        about = file.stat()
        found.add(os.minor(about.st_rdev) if stat.S_ISCHR(about.st_mode) else int(file.name.removeprefix("neuron")))
    return sorted(found)


def check_links(kind: Instance, chips: Sequence[Chip]) -> list[str]:
    """What differs between the links the type should have and those neuron-ls reports; a missing link slows or breaks collectives."""
    wrong = []
    for chip in chips:
        expected = kind.neighbours(chip.device)
        if chip.linked and chip.linked != expected:
            wrong.append(f"device {chip.device} is linked to {compact(chip.linked)}, expected {compact(expected)}")
    return wrong


def probe(root: Path = Path("/")) -> tuple[tuple[Chip, ...], str | None]:
    """This machine's devices and DMI product name, read below `root`. Raises ConfigError where neuron-ls is there but fails."""
    product = root / "sys/devices/virtual/dmi/id/product_name"
    name = product.read_text().strip() if product.is_file() else None
    tool = root / NEURON_LS
    if not tool.exists():
        return (), name
    try:
        ran = subprocess.run([str(tool), "--json-output"], capture_output=True, text=True, timeout=_TEN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ConfigError(f"{tool} could not be run: {problem}; is the Neuron driver loaded? {PRESENT}") from None
    if ran.returncode != 0:
        why = f"{tool} failed with code {ran.returncode}: {ran.stderr.strip()[:200]}"
        raise ConfigError(f"{why}; is the Neuron driver loaded? {PRESENT}")
    return parse_neuron_ls(ran.stdout), name


def this_node(named: str | None, ray_cores: int | None, vcpus: int, root: Path = Path("/")) -> Instance:
    """`probe`, then `detect`: the type of the node this process runs on. Raises ConfigError."""
    chips, product = probe(root)
    return detect(Facts(named, chips, product, ray_cores, vcpus))


def visible(cores: Sequence[int]) -> str:
    """The comma form, the only one Ray counts right. Raises ConfigError unless the cores are contiguous and ascending."""
    if not cores:
        raise ConfigError(f"{VISIBLE} would be empty, which the runtime reads as all cores; give at least one core", param=VISIBLE)
    if list(cores) != list(range(cores[0], cores[0] + len(cores))):
        raise ConfigError(
            f"cores {','.join(map(str, cores))} are not contiguous and ascending, as the runtime requires; "
            f"write {','.join(map(str, range(cores[0], cores[0] + len(cores))))} or another run",
            param=VISIBLE,
        )
    return ",".join(map(str, cores))


def check_claim(value: str | None, kind: Instance) -> tuple[int, ...]:
    """The gate before the runtime starts: the cores this process may touch. Raises ConfigError.

    Refuses the variable unset or empty (the runtime then takes every core of the node), gaps, disorder, misalignment, cores the node lacks.
    """
    if value is None or not value.strip():
        state = "unset" if value is None else "empty"
        raise ConfigError(
            f"{VISIBLE} is {state}: the Neuron runtime would take all {kind.cores} cores of the node. "
            "Start this process through the core ledger",
            param=VISIBLE,
        )
    cores = parse_visible(value)
    visible(cores)
    if cores[-1] >= kind.cores:
        raise ConfigError(f"{VISIBLE}={value} names core {cores[-1]}, but {kind.name} has cores 0-{kind.cores - 1}", param=VISIBLE)
    if cores[0] % len(cores):
        good = cores[0] - cores[0] % len(cores)
        raise ConfigError(
            f"{VISIBLE}={value}: a group of {len(cores)} cores must start at a multiple of {len(cores)}, not at {cores[0]}; "
            f"write {','.join(map(str, range(good, good + len(cores))))}",
            param=VISIBLE,
        )
    return cores


def refuse_hand_set(environment: Mapping[str, str], where: str) -> None:
    """Refuse a deployment (or runtime_env) that chooses cores by hand: Ray gives the same core to a second actor. Raises ConfigError."""
    for name in (VISIBLE, COUNT):
        if name in environment:
            raise ConfigError(
                f"{where} sets {name}={environment[name]!r}, but the core ledger chooses cores; remove it and write tensor_parallel: N",
                param=name,
            )


def raylet_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment to start a raylet in: a visible-cores list in comma form (Ray counts "0-3" as one core), and Ray told not to set it.

    Raises ConfigError where the list is not one contiguous run, or there is only a number of cores.
    """
    out = dict(environment)
    if VISIBLE in out:
        out[VISIBLE] = visible(parse_visible(out[VISIBLE]))
    elif out.get(COUNT):
        raise ConfigError(f"{COUNT}={out[COUNT]} does not say which cores are left to us; write {VISIBLE}=0-N instead", param=COUNT)
    out[NOSET] = "1"
    return out
