"""What each Serve deployment of ours is besides its work: how it is placed and opened, its metrics, and that it ends with its engine."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Coroutine
from functools import partial
from typing import Any

import ray
from ray import serve

from rayneuron import devices, loading, settings
from rayneuron.config import Deployment
from rayneuron.errors import ConfigError, RayNeuronError
from rayneuron.placement.layout import Layout, group_layout
from rayneuron.serve.actors import Actors, check_room, refuse_chosen_cores, worker_options
from rayneuron.serve.telemetry import RayExport, Telemetry

log = logging.getLogger(__name__)

MAX_ONGOING = 100_000  # admission is ours: Serve's own queue retries with a back-off of up to half a second
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
DRAIN_CHECK_S = 0.5
CONSTRUCTOR_RETRIES = 2
EXPORT_PERIOD_S = 2.0
START_S = 1.0  # for a start that fails to say why by itself
LAST_BYTES_S = 0.5  # for Serve's proxy to fetch what streams said last
STARTING_OBJECTS, SERVING_OBJECTS = 100_000, (10_000, 10, 10)  # new ones before garbage is looked for: calls in flight hold thousands
TOKENIZERS = "TOKENIZERS_PARALLELISM"  # the library's: whether a batch goes to threads of its own, even one text
SWITCH_INTERVAL_S = 0.0002  # engine, event loop and text share one interpreter; the default of 5 ms delays every token by as much


class Deployed:
    """A replica whose process ends when what it is there for is lost."""

    telemetry: Telemetry
    _leaving = False
    _event_loop: asyncio.AbstractEventLoop
    _tasks: list[asyncio.Task[None]]  # for as long as the replica lives
    _exported: RayExport

    def _begin(self) -> None:
        gc.set_threshold(STARTING_OBJECTS)  # what is imported stays: looking through it again and again is a seventh of a start's work
        log_through_serve()
        self._event_loop, self._tasks = asyncio.get_running_loop(), []

    def _opener_of(self, config: Deployment, opener: Any) -> Any:
        """`opener`, or where that is ours and there are several ranks, one whose other workers are actors in this replica's placement
        group."""
        if opener is not loading.open_engine:
            return opener
        return self._open_group if layout_of(config).grouped else partial(loading.open_engine, imported=gc.freeze)

    def _open_group(self, config: Deployment, progress: loading.StageProgress) -> loading.Opened:
        actors = Actors(layout_of(config))
        return loading.open_engine(config, progress, processes=actors, on_lost=self._lost, imported=gc.freeze)

    async def _opened(self, opening: Coroutine[Any, Any, None]) -> None:
        """Open what is opened on a thread of its own, and make meanwhile what the first call would else wait for."""
        task = self._event_loop.create_task(opening)
        await asyncio.sleep(0)  # it has begun
        await self._prepare()
        await task
        settle_interpreter()
        self._tasks.append(self._event_loop.create_task(_export(self._exported)))

    async def _prepare(self) -> None:
        self._exported = RayExport(self.telemetry)

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _lost(self, reason: str) -> None:
        """This process ends (told by any thread), so that Serve replaces it, and with it the whole group, once."""
        if self._leaving:
            return
        self._leaving = True
        self._event_loop.call_soon_threadsafe(lambda: self._event_loop.create_task(self._leave(reason)))

    async def _leave(self, reason: str) -> None:
        log.error("this replica ends: %s", reason)
        await self._farewell()
        await asyncio.sleep(LAST_BYTES_S)
        os._exit(1)

    async def _farewell(self) -> None:
        """What is said to those who wait for it."""
        await asyncio.sleep(START_S)

    def _checked(self, check: Any) -> None:
        """A health check. One that is dead or wedged ends at once: Serve would ask three times, and then drain what cannot finish."""
        try:
            check()
        except RayNeuronError as wrong:
            self._lost(wrong.message)
            raise


def settle_interpreter() -> None:
    """Set this process up to serve: threads wait little for each other, a text is tokenised by the one that asks, and what start-up made is
    not collected again.

    It lives for ever; a full collection over it would hold every stream for tens of milliseconds.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings.export({TOKENIZERS: settings.given(TOKENIZERS) or "false"})
    gc.set_threshold(*SERVING_OBJECTS)
    gc.collect()
    gc.freeze()


def serve_deployment(replica: type, name: str, config: Deployment) -> Any:
    """A replica class as a deployment of Serve: where it is placed, how many there are. Raises ConfigError."""
    serving = config.serving
    scaling = serving.autoscaling.model_dump(exclude_unset=True) if serving.autoscaling is not None else None
    return serve.deployment(
        replica,
        name=name,
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=serving.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=CONSTRUCTOR_RETRIES,
        **placement_of(config),
        **({"autoscaling_config": scaling} if scaling is not None else {"num_replicas": serving.num_replicas or 1}),
    )


def layout_of(config: Deployment) -> Layout:
    """Where the ranks of one replica run. Raises ConfigError."""
    return group_layout(config, devices.ranks_per_process(config.device))


def placement_of(config: Deployment) -> dict[str, Any]:
    """The deployment options that give a replica its CPUs and cores. Raises ConfigError where the cluster could never hold it."""
    layout = layout_of(config)
    if ray.is_initialized():
        refuse_chosen_cores()
        try:
            check_room(layout)
        except ConfigError as short:
            if not config.serving.wait_for_nodes:
                raise
            log.warning("%s: waiting for nodes: %s", config.model.served_name, short.message)
    if not layout.grouped:
        return {"ray_actor_options": {"num_cpus": config.serving.num_cpus or 1}}
    seat = config.serving.seat
    there = {} if seat is None else {f"node:{seat.node}": 0.001}  # Ray's own resource of each node
    return {
        "ray_actor_options": worker_options(layout, layout.workers[0]),
        "placement_group_bundles": [{**bundle, **there} for bundle in layout.bundles],
        "placement_group_strategy": layout.strategy,
    }


async def _export(export: RayExport) -> None:
    while True:
        await asyncio.sleep(EXPORT_PERIOD_S)
        try:
            export.push()
        except Exception:
            log.exception("metrics could not be handed to Ray; trying again")


def log_through_serve() -> None:
    """Send our lines where Serve sends its own: the replica's log file, and the terminal of `serve run`."""
    ours, serves = logging.getLogger("rayneuron"), logging.getLogger("ray.serve")
    ours.setLevel(logging.INFO)
    ours.handlers = list(serves.handlers)
    ours.propagate = False
    serves.addFilter(_worth_a_line)


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Not what gateways and collectors ask of every replica, twice a second, and get; nor calls that only wait for orders to end."""
    return not record.getMessage().startswith(("CALL card OK", "CALL replica_metrics OK", "CALL attend OK"))
