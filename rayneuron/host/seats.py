"""Seats in Ray Serve: an application for each, brought and taken away; and what Ray remembers of those there are."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayneuron.config import Deployment
from rayneuron.deployment_file import DEPLOYMENT
from rayneuron.errors import RayNeuronError
from rayneuron.group_config import SeatSection
from rayneuron.host.keeper import Keeper
from rayneuron.host.table import SeatRow
from rayneuron.placement.layout import CORES
from rayneuron.serve import readiness
from rayneuron.serve.app import application_of

log = logging.getLogger(__name__)

KEY = b"rayneuron:seat:"  # what Ray keeps of each
CLAIM = b"rayneuron:arbiter:"  # and whose they are
LOOK_S, SILENT_S = 1.0, 60.0  # how long a look waits for a keeper; and until it is given up, which may have been started a moment ago
PATIENCE_S = 2.0  # beyond what streams were given


class Seats:
    """What the arbiter does with Ray. Every call blocks: the arbiter makes them on threads. `owner`: the gateway's application.

    Serve starts a new arbiter while the one before it ends: whoever has claimed the seats last is obeyed.
    """

    def __init__(self, owner: str, orphan_s: float) -> None:
        self._owner, self._orphan_s = owner, orphan_s
        self._claim = secrets.token_bytes(8)
        self._building = threading.Lock()  # Serve notes for the whole process what it pickles by value: two at once take it from each other

    def claim(self) -> None:
        """Be the one who says what becomes of the seats."""
        _internal_kv_put(CLAIM + self._owner.encode(), self._claim, overwrite=True)

    def _claimed(self) -> None:
        if _internal_kv_get(CLAIM + self._owner.encode()) != self._claim:
            raise RayNeuronError("another arbiter has taken over")

    def start(self, row: SeatRow, config: Deployment) -> None:
        """Bring the application of a seat; it is there when `look` says so. Raises what the builder refuses."""
        self._claimed()
        cores = list(range(row.first, row.first + row.size))
        seat = SeatSection(node=row.node, cores=cores, owner=self._owner, orphan_s=self._orphan_s)
        serving = config.serving.model_copy(update={"seat": seat})
        serving.__pydantic_fields_set__.add("seat")
        placed = config.model_copy(update={"serving": serving})
        placed.__pydantic_fields_set__.add("serving")
        self._note(row.key, {"model": row.model, "node": row.node, "cores": cores, "words": words_of(config), "owner": self._owner})
        readiness.forget(row.key)
        with self._building:
            target = serve.RunTarget(application_of(placed), row.key, None)
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def drain(self, key: str, within_s: float) -> None:
        """Let the streams of a seat end, those that do not go on elsewhere or end with an error, then give its engine back. It is noted
        first: whoever finds the seat afterwards takes it for one that goes, though Serve still runs it."""
        self._claimed()
        if (said := self.known(key)) is not None:
            self._note(key, {**said, "words": ""})
        handle = serve.get_deployment_handle(DEPLOYMENT, key)
        handle.broadcast("retire", within_s).results(timeout_s=within_s + PATIENCE_S)

    def delete(self, key: str) -> None:
        """Take the application away, then what is known of it."""
        self._claimed()
        serve.delete(key, _blocking=False)
        _internal_kv_del(KEY + key.encode())
        readiness.forget(key)

    def look(self) -> dict[str, readiness.State]:
        """All applications that Serve has."""
        return readiness.look()

    def seconds(self, key: str) -> dict[str, float]:
        """What the parts of a seat's start took."""
        handle = serve.get_deployment_handle(DEPLOYMENT, key)
        (told,) = handle.broadcast("start_seconds").results(timeout_s=PATIENCE_S)
        return dict(told)

    def known(self, key: str) -> Mapping[str, Any] | None:
        """What was said of a seat when it was started, None where the application is none of this gateway's."""
        blob = _internal_kv_get(KEY + key.encode())
        said: dict[str, Any] = {} if blob is None else json.loads(blob)
        return said if said.get("owner") == self._owner else None

    def _note(self, key: str, said: Mapping[str, Any]) -> None:
        _internal_kv_put(KEY + key.encode(), json.dumps(said).encode(), overwrite=True)


class Keepers:
    """The keepers of all nodes, as actors there."""

    def __init__(self, instance: str, most: int) -> None:
        self._instance, self._most = instance, most
        self._actors: dict[str, Any] = {}
        self._seen: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, tuple[float, Any]] = {}  # since when each is asked, and its answer to be

    def look(self) -> dict[str, dict[str, Any]]:
        """What each says of its node. Where one does not answer yet, nothing there counts as free (`silent`); one that has died, or says
        nothing for long, is made anew. Only a node that Ray has lost is not in it."""
        there = {n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get(CORES, 0) >= 1}
        for gone in self._actors.keys() - there.keys():
            self._drop(gone)
        for node in sorted(there, key=lambda node: (node not in self._actors, node))[: self._most]:
            if node not in self._actors:
                place = NodeAffinitySchedulingStrategy(there[node], soft=False)
                made = ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=place)
                self._actors[node] = made.remote(node, self._instance)
        for node, actor in self._actors.items():
            if node not in self._asked:
                self._asked[node] = (time.monotonic(), actor.look.remote())
        if self._asked:
            ray.wait([answer for _, answer in self._asked.values()], num_returns=len(self._asked), timeout=LOOK_S)
        return {node: self._told(node) for node in list(self._actors)}

    def _told(self, node: str) -> dict[str, Any]:
        since_s, answer = self._asked[node]
        try:
            self._seen[node] = ray.get(answer, timeout=0)
            del self._asked[node]
            return self._seen[node]
        except ray.exceptions.GetTimeoutError:
            if time.monotonic() - since_s > SILENT_S:
                log.warning("the keeper of %s says nothing, and is made anew", node)
                self._drop(node)
        except Exception as wrong:
            log.warning("the keeper of %s has died, and is made anew: %r", node, wrong)
            self._drop(node)
        return {**self._seen.get(node, {"left": [], "holders": []}), "free": [], "silent": True}

    def _drop(self, node: str) -> None:
        self._asked.pop(node, None)
        ray.kill(self._actors.pop(node))

    def weights(self, source: str) -> tuple[int, float]:
        """Bytes of a model's weights, and the share that is in memory, of the node that knows most."""
        asked = [actor.weights.remote(source) for actor in self._actors.values()]
        return max(ray.get(asked, timeout=30), default=(0, 0.0))

    def warm(self, sources: list[str], most_bytes: int) -> None:
        """Have every node read these weights ahead."""
        for actor in self._actors.values():
            actor.warm.remote(sources, most_bytes)


def words_of(config: Deployment) -> str:
    """A digest of a model's words: a seat of others is not adopted."""
    said = json.dumps(config.model_dump(exclude={"serving": {"seat"}}, mode="json"), sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()
