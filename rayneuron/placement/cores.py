"""Which cores a node has and how they are written: neuron-ls, declared instances, NEURON_RT_VISIBLE_CORES."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayneuron.errors import ConfigError
from rayneuron.placement.instances import INSTANCES, Instance, declared, instance
from rayneuron.policies.packing import compact

VISIBLE = "NEURON_RT_VISIBLE_CORES"
COUNT = "NEURON_RT_NUM_CORES"
NOSET = "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES"
NEURON_LS = "opt/aws/neuron/bin/neuron-ls"
_TEN_S = 10.0


@dataclass(frozen=True, slots=True)
class Chip:
    """One device as neuron-ls lists it. `cores` counts logical cores; `lnc`, `linked` and `pids` are empty on versions that do not say."""

    device: int
    cores: int
    memory_bytes: int
    linked: tuple[int, ...] = ()
    lnc: int | None = None
    pids: tuple[int, ...] = ()


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
        return tuple(sorted((_chip(entry) for entry in listed), key=lambda chip: chip.device))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(f"neuron-ls printed something else than a list of devices ({problem}): {text.strip()[:120]!r}") from None


def _chip(entry: Mapping[str, Any]) -> Chip:
    lnc = entry.get("logical_neuroncore_config")
    return Chip(
        device=int(entry["neuron_device"]),
        cores=int(entry["nc_count"]),
        memory_bytes=int(entry["memory_size"]),
        linked=tuple(sorted(int(d) for d in entry.get("connected_to") or ())),
        lnc=None if lnc is None else int(lnc),
        pids=tuple(int(p["pid"]) for p in entry.get("neuron_processes") or ()),
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
    lnc = facts.chips[0].lnc
    shape = (len(facts.chips), facts.chips[0].cores)
    fits = []
    for kind in INSTANCES.values():
        for size in kind.lncs if lnc is None else (lnc,):
            memory_close = abs(kind.device_memory_bytes - facts.chips[0].memory_bytes) < kind.device_memory_bytes // 4
            if size in kind.lncs and memory_close and (kind.devices, kind.cores_per_device // size) == shape:
                fits.append(kind.logical(size))
    seen = f"{shape[0]} devices of {shape[1]} cores and {facts.chips[0].memory_bytes / 2**30:.0f} GiB"
    if wanted is not None:
        if (wanted.name, wanted.lnc) not in {(kind.name, kind.lnc) for kind in fits}:
            raise ConfigError(
                f"the configuration names {wanted.name} but neuron-ls shows {seen}; remove `instance:` or correct it", param="instance"
            )
        return wanted
    if not fits:
        raise ConfigError(f"neuron-ls shows {seen}, which is no instance type known here; known are {', '.join(INSTANCES)}")
    named = [kind for kind in fits if kind.name == facts.product]
    return (named or sorted(fits, key=lambda kind: abs(kind.vcpus - facts.vcpus)))[0]


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
        raise ConfigError(f"{tool} could not be run: {problem}; is the Neuron driver loaded?") from None
    if ran.returncode != 0:
        raise ConfigError(f"{tool} failed with code {ran.returncode}: {ran.stderr.strip()[:200]}; is the Neuron driver loaded?")
    return parse_neuron_ls(ran.stdout), name


def this_node(named: str | None, ray_cores: int | None, vcpus: int, root: Path = Path("/")) -> Instance:
    """`probe`, then `detect`: the type of the node this process runs on. Raises ConfigError."""
    chips, product = probe(root)
    return detect(Facts(named, chips, product, ray_cores, vcpus))


def parse_visible(text: str) -> tuple[int, ...]:
    """Core numbers of "0,1,2", "0-3" or "0-3,8" as written. Raises ConfigError on anything else, an empty text included."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if match is None:
            raise ConfigError(f"{VISIBLE}={text!r} is no list of cores; write 0,1,2,3", param=VISIBLE)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= first + 1024:
            raise ConfigError(f"{VISIBLE}={text!r}: {first}-{last} is no ascending range of cores; write 0,1,2,3", param=VISIBLE)
        cores.extend(range(first, last + 1))
    return tuple(cores)


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

    Raises ConfigError where the list is not one contiguous run.
    """
    out = dict(environment)
    if VISIBLE in out:
        out[VISIBLE] = visible(parse_visible(out[VISIBLE]))
    out[NOSET] = "1"
    return out
