"""Where graphs run: open a device by its name."""

from __future__ import annotations

from typing import Any

from rayneuron.devices.base import Device
from rayneuron.errors import ConfigError

NAMES = ("cpu", "neuron", "null")


def check(name: str) -> None:
    """Raise ConfigError for a device that this version cannot open."""
    if name not in NAMES:
        raise ConfigError(f"device {name!r} is unknown; write one of {', '.join(NAMES)}")
    if name != "cpu":
        raise ConfigError(f"device {name!r} is not part of this version yet; write device: cpu")


def ranks_per_process(name: str) -> int:
    """The most ranks one process of the device drives: on Neuron it drives all its cores of a node, elsewhere one."""
    return 1024 if name == "neuron" else 1


def open(name: str, **options: Any) -> Device:
    """The device `name`; options are its constructor's. Raises ConfigError for an unknown or unavailable one."""
    check(name)
    from rayneuron.devices.cpu import Cpu

    return Cpu(**options)
