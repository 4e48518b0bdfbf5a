"""The only place that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir() -> Path:
    """Where converted models and compiled graphs live: RAYNEURON_CACHE, else XDG_CACHE_HOME/rayneuron, else ~/.cache/rayneuron."""
    named = os.environ.get("RAYNEURON_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rayneuron"


def threads() -> int:
    """CPU threads of one rank when the configuration names none: OMP_NUM_THREADS if it is set by hand, else the cores this process may use.

    Ray sets OMP_NUM_THREADS=1 in actors whose num_cpus is 1 or less, so a Serve replica passes its share explicitly instead.
    """
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdigit() and int(named) > 0 else len(os.sched_getaffinity(0))


def behind_haproxy() -> bool:
    """Whether replicas answer HTTP themselves behind HAProxy (RAY_SERVE_ENABLE_HA_PROXY, the profile `fast`)."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "0") == "1"


def environment(defaults: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program this process becomes: its own, with `defaults` where a name is not set."""
    return {**defaults, **os.environ}


def overridden(values: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process: this one's, with `values` on top."""
    return {**os.environ, **values}


def export(values: Mapping[str, str]) -> None:
    """Set variables of this process, for libraries that read them later."""
    os.environ.update(values)


def ledger_dir() -> Path:
    """Where the core locks of this machine live, one folder a node: RAYNEURON_LEDGER, else /tmp/rayneuron-cores."""
    return Path(os.environ.get("RAYNEURON_LEDGER") or "/tmp/rayneuron-cores")


def compile_cache_url() -> str | None:
    """Where compiled programs are kept, as the Neuron SDK names it: NEURON_COMPILE_CACHE_URL, a folder or s3://bucket/prefix."""
    return os.environ.get("NEURON_COMPILE_CACHE_URL") or None


def visible_cores() -> str | None:
    """The Neuron cores this process may use, as the runtime reads them: NEURON_RT_VISIBLE_CORES."""
    return os.environ.get("NEURON_RT_VISIBLE_CORES") or None


def variable(name: str) -> str | None:
    """One variable that a deployment file names (`env:NAME`), None where it is not set."""
    return os.environ.get(name)
