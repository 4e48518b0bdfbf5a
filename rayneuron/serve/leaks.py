"""The groups of a cluster: nodes and their cores, placement groups of Serve's replicas, and those whose replica is gone.

Serve's placement groups are detached: where controller and replica die together, nobody removes them (ray#26535), and their cores
stay booked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.util.placement_group import remove_placement_group

from rayneuron.deployment_file import PREFILL
from rayneuron.placement.layout import CORES
from rayneuron.serve.actors import free_resources
from rayneuron.serve.port import reach

PREFIXES = ("SERVE_REPLICA::", "SERVE_GANG::")
_ANSWER_S = 5.0
_AGAIN_S = 2.0  # a replica's group is made a moment before the replica


def report(address: str, *, clean: bool = False) -> Iterator[str]:
    """Lines for people; `clean` removes the placement groups that are leaked. Raises ConnectionError where no cluster answers."""
    reach(address)
    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield from _nodes()
        orphans = leaked()
        if orphans:
            time.sleep(_AGAIN_S)
            orphans = sorted(set(orphans) & set(leaked()))
        for group in groups():
            state = "leaked: no such replica" if group["name"] in orphans else "in use"
            bundles = "; ".join(", ".join(f"{k} {v:g}" for k, v in bundle.items()) for bundle in group["bundles"].values())
            yield f"group {group['name']} [{bundles}] {group['state']}: {state}"
            if clean and group["name"] in orphans:
                remove_placement_group(ray.util.get_placement_group(group["name"]))
                yield f"  removed {group['name']}"
        yield from _pools()
    finally:
        ray.shutdown()


def groups() -> list[dict[str, Any]]:
    """Placement groups of Serve that exist, by name."""
    table = ray.util.placement_group_table().values()
    return sorted((g for g in table if g["name"].startswith(PREFIXES) and g["state"] != "REMOVED"), key=lambda g: g["name"])


def leaked() -> list[str]:
    """Names of those without an actor: a replica has the name of its group."""
    alive = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    single = PREFIXES[0]  # members of a gang have names of their own, so its group cannot be judged by one
    return [g["name"] for g in groups() if g["name"].startswith(single) and g["name"] not in alive]


def _pools() -> Iterator[str]:
    """Tickets and pins of the prefill replicas of every application that has some."""
    try:
        applications = serve.status().applications
    except RayServeException:
        return  # no Serve runs there
    for name, application in applications.items():
        if PREFILL not in application.deployments:
            continue
        answers = serve.get_deployment_handle(PREFILL, name).broadcast("stats").results(timeout_s=_ANSWER_S, return_exceptions=True)
        for said in answers:
            if isinstance(said, BaseException):
                yield f"prefill replica of {name}: no answer ({said})"
                continue
            tickets = ", ".join(f"{how} {n:g}" for how, n in said["tickets"].items())
            kept = f"{said['pinned_blocks']} of {said['blocks']} KV blocks are kept for others"
            yield f"prefill replica of {name}: tickets {tickets}; {kept}; {said['strangers']} connections were refused"


def _nodes() -> Iterator[str]:
    free = free_resources()
    for node in ray.nodes():
        if node["Alive"]:
            total = node["Resources"]
            left = free.get(node["NodeID"], {})
            words = [f"{name} {left.get(name, 0):g} free of {total.get(name, 0):g}" for name in ("CPU", CORES)]
            yield f"node {node['NodeManagerAddress']}: {', '.join(words)}"
