"""The only place that reads environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_EXPORTED, _BOUND = "RAYNEURON_EXPORTED", "RAYNEURON_RUNTIME"  # kept in the environment, so that children know them too


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


def variables() -> dict[str, str]:
    """All of them, for those who read the variables of another system's container."""
    return dict(os.environ)


def export(values: Mapping[str, str]) -> None:
    """Set variables of this process, for libraries that read them later. What they were before stays known to `given`."""
    changed = {name: value for name, value in values.items() if os.environ.get(name) != value}
    found = _exported() | {name: [value, given(name)] for name, value in changed.items()}
    os.environ.update({**changed, _EXPORTED: json.dumps(found)})


def become(values: Mapping[str, str]) -> None:
    """Have these variables and no others: those of the process that this one is in place of."""
    os.environ.clear()
    os.environ.update(values)


def given(name: str) -> str | None:
    """What the operator says: a variable as it was before this program, or the one it was started by, exported its own value."""
    now = os.environ.get(name)
    ours, before = _exported().get(name, (None, None))
    return before if now is not None and now == ours else now


def _exported() -> dict[str, Any]:
    return dict(json.loads(os.environ.get(_EXPORTED) or "{}"))


def bound_cores() -> tuple[str, str] | None:
    """(NEURON_RT_VISIBLE_CORES, what runs there) of the Neuron runtime of this very process, None where none was started in it."""
    pid, _, said = os.environ.get(_BOUND, "").partition(" ")
    cores, _, name = said.partition(" ")
    return (cores, name) if pid == str(os.getpid()) else None


def bind(cores: str, name: str) -> None:
    """Note that the runtime of this process is about to take `cores`, for good."""
    if bound_cores() is None:
        os.environ[_BOUND] = f"{os.getpid()} {cores} {name}"


def root_ports() -> str | None:
    """Ports of this node that the Neuron runtime may meet on, RAYNEURON_ROOT_PORTS: FIRST-LAST; None: `placement.ports` says."""
    return os.environ.get("RAYNEURON_ROOT_PORTS") or None


def any_sdk() -> bool:
    """Whether an SDK that is not known to serve models on this chip is tried all the same: RAYNEURON_ANY_SDK=1."""
    return os.environ.get("RAYNEURON_ANY_SDK") == "1"


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


def hub_model() -> str | None:
    """The model to serve where a command names none, as the containers of hubs do: HF_MODEL_ID."""
    return os.environ.get("HF_MODEL_ID") or None


def hub_endpoint() -> str | None:
    """The hub that models are fetched from: HF_ENDPOINT; default: https://huggingface.co."""
    return os.environ.get("HF_ENDPOINT") or None


def hub_token() -> str | None:
    """What a hub is asked with: HF_TOKEN; default: what `hf auth login` has stored."""
    return os.environ.get("HF_TOKEN") or None


def hub_offline() -> bool:
    """Whether only models that are on this machine may be used: HF_HUB_OFFLINE."""
    return (os.environ.get("HF_HUB_OFFLINE") or "").upper() in ("1", "ON", "YES", "TRUE")
