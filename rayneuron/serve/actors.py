"""Workers of a group as Ray actors in the placement group of their replica; and whether a cluster has room for a group at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayneuron.errors import ConfigError, NotReady
from rayneuron.group.worker import Invitation, serve_rank
from rayneuron.placement.cores import NOSET, refuse_hand_set
from rayneuron.placement.environment import BEFORE_START
from rayneuron.placement.layout import CORES, Layout, Worker


class RankActor:
    """One worker. `serve` lasts as long as the group; the actor is never restarted, for a group restarts whole."""

    def serve(self, invitation: bytes) -> None:
        """Come to the group and serve it to its end."""
        serve_rank(msgspec.msgpack.decode(invitation, type=Invitation))


class Actors:
    """The other workers of the replica this process is. Bundle i of its placement group is node i of the layout."""

    def __init__(self, layout: Layout) -> None:
        refuse_chosen_cores()
        group = ray.util.get_current_placement_group()
        if group is None:
            raise NotReady("this replica has no placement group; deploy it with rayneuron.serve.app:build")
        bundles = ray.util.placement_group_table(group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        missing = [bundle for bundle, node in bundles.items() if node not in addresses]
        if missing:
            raise NotReady(f"the nodes of bundles {missing} have left the cluster")
        self.node_ips: Sequence[str] = [addresses[bundles[i]] for i in range(layout.nodes)]
        self._group = group
        self._layout = layout
        self._actors: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}  # worker -> the reference that is ready when it has ended

    def start(self, invitations: Sequence[Invitation], nodes: Sequence[int]) -> None:
        """One actor a worker, in its node's bundle."""
        for invitation in invitations:
            worker = self._layout.workers[invitation.index]
            options = worker_options(self._layout, worker)
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=worker.node)
            actor = ray.remote(RankActor).options(max_restarts=0, scheduling_strategy=place, **options).remote()
            self._actors[worker.index] = actor
            self._ends[worker.index] = actor.serve.remote(msgspec.msgpack.encode(invitation))

    def gone(self) -> Mapping[int, str]:
        """Actors that have ended, and Ray's word on how."""
        out = {}
        for index, end in self._ends.items():
            if ray.wait([end], timeout=0)[0]:
                try:
                    ray.get(end)
                    out[index] = "it has stopped"
                except RayError as problem:
                    out[index] = " ".join(str(problem).split())[:300]
        return out

    def end(self, within_s: float) -> None:
        """Wait, then kill."""
        if self._ends:
            ray.wait(list(self._ends.values()), num_returns=len(self._ends), timeout=within_s)
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._ends.clear()


def worker_options(layout: Layout, worker: Worker) -> dict[str, Any]:
    """num_cpus, resources and runtime_env of one worker: its share of its node's bundle. The replica's own are those of worker 0."""
    bundle = layout.bundles[worker.node]
    options: dict[str, Any] = {"num_cpus": bundle["CPU"] / len(layout.on_node(worker.node))}
    if CORES in bundle:
        options["resources"] = {CORES: len(worker.ranks)}
        options["runtime_env"] = {"env_vars": {NOSET: "1", **BEFORE_START}}  # which cores is the ledger's decision, Ray only counts them
    return options


def refuse_chosen_cores() -> None:
    """Refuse cores chosen by hand in the runtime_env this process was started with: the ledger chooses. Raises ConfigError."""
    refuse_hand_set(ray.get_runtime_context().runtime_env.get("env_vars") or {}, "the deployment's runtime_env")


def check_room(layout: Layout) -> None:
    """Refuse a group that the cluster could not hold if it were empty: Serve would wait for ever. Raises ConfigError with what there is."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    big = [node for node in nodes if all(node["Resources"].get(name, 0) >= amount for name, amount in layout.bundles[0].items())]
    if len(big) >= len(layout.bundles):
        return
    bundle = ", ".join(f"{name} {amount:g}" for name, amount in layout.bundles[0].items())
    free = free_resources()
    there = "; ".join(
        f"{node['NodeManagerAddress']}: " + ", ".join(_count(name, node, free) for name in layout.bundles[0]) for node in nodes
    )
    raise ConfigError(
        f"the group wants {len(layout.bundles)} bundles of {{{bundle}}}, each on a node of its own; the cluster has {there}. "
        "Add nodes, declare neuron_cores where they start, or lower tensor_parallel, serving.num_cpus or nodes; "
        "where an autoscaler adds nodes, write serving.wait_for_nodes: true"
    )


def _count(name: str, node: Mapping[str, Any], free: Mapping[str, Mapping[str, float]]) -> str:
    total = node["Resources"].get(name, 0)
    return f"{name} {total:g}" + (f" ({free[node['NodeID']].get(name, 0):g} free)" if node["NodeID"] in free else "")


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Node id -> what nobody has booked there; empty where this Ray does not say."""
    try:
        from ray._private.state import available_resources_per_node  # no public call says it a node

        return dict(available_resources_per_node())
    except (ImportError, AttributeError):
        return {}
