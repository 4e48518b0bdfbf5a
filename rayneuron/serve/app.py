"""`rayneuron.serve.app:build`: the Ray Serve application of one model, for `serve run`, `serve deploy` and `serve.run`."""

# No `from __future__ import annotations` here: it would silently switch off Ray's handling of the builder's argument.
import asyncio
import contextvars
import gc
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette

from rayneuron import config as deployment
from rayneuron import devices, loading, preflight
from rayneuron.config import Deployment
from rayneuron.errors import ConfigError, NotReady, RayNeuronError
from rayneuron.placement.layout import Layout, group_layout
from rayneuron.serve import readiness
from rayneuron.serve.actors import Actors, check_room, refuse_chosen_cores, worker_options
from rayneuron.serve.hub import Hub
from rayneuron.serve.ingress import application
from rayneuron.serve.replica import Opener, Replica
from rayneuron.serve.telemetry import RayExport, merged

log = logging.getLogger(__name__)

MAX_ONGOING = 100_000  # admission is ours: Serve's own queue retries with a back-off of up to half a second
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
DRAIN_CHECK_S = 0.5
CONSTRUCTOR_RETRIES = 2
EXPORT_PERIOD_S = 2.0
PEERS_S = 2.0  # for the other replicas to give their part of a scrape
START_S = 1.0  # for a start that fails to say why by itself
LAST_BYTES_S = 0.5  # for Serve's proxy to fetch what streams said last
SWITCH_INTERVAL_S = 0.0002  # engine, event loop and text share one interpreter; the default of 5 ms delays every token by as much


def settle_interpreter() -> None:
    """Set this process up to serve: threads wait little for each other, and what start-up made is not collected again.

    It lives for ever; a full collection over it would hold every stream for tens of milliseconds.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()


@serve.ingress()
class ServedEngine(Replica):
    """A Replica as a Serve deployment: its own ASGI ingress, bound late (an app decorated in a builder loses its routes)."""

    async def __init__(self, config: Mapping[str, Any], opener: Opener = loading.open_engine) -> None:  # type: ignore[misc]
        log_through_serve()
        self._event_loop = asyncio.get_running_loop()
        opener = self._open_group if opener is loading.open_engine and layout_of(deployment.parse(config)).grouped else opener
        Replica.__init__(self, config, opener, str(serve.get_replica_context().rank.rank))
        await self.open()
        settle_interpreter()
        self._hub = Hub(self, serve.get_replica_context().replica_id.unique_id)
        await self._hub.listen(ray.util.get_node_ip_address())
        await self.address(self._hub.replica)
        self._export = asyncio.get_running_loop().create_task(_export(RayExport(self.telemetry)))

    def _open_group(self, config: Deployment, progress: loading.StageProgress) -> loading.Opened:
        """Worker 0 of a group, whose other workers are actors in this replica's placement group."""
        return loading.open_engine(config, progress, processes=Actors(layout_of(config)), on_lost=self._lost)

    def check_health(self) -> None:
        """As Replica's. One that is dead or wedged ends at once: Serve would ask three times, and then drain what cannot finish."""
        try:
            Replica.check_health(self)
        except RayNeuronError as wrong:
            self._lost(wrong.message)
            raise

    def _lost(self, reason: str) -> None:
        """This process ends (told by any thread), so that Serve replaces it, and with it the whole group, once."""
        if self._leaving:
            return
        self._leaving = True
        self._event_loop.call_soon_threadsafe(lambda: self._event_loop.create_task(self._leave(reason)))

    async def _leave(self, reason: str) -> None:
        log.error("this replica ends: %s", reason)
        served = self._served
        if served is not None:
            if self._hub is not None:
                self._hub.leave(0.0)
            self.leave()
            await served.end(0.0, NotReady("this replica has failed and is being replaced", retry_after_s=5.0))
        else:
            await asyncio.sleep(START_S)
        await asyncio.sleep(LAST_BYTES_S)
        os._exit(1)

    @serve.multiplexed(max_num_models_per_replica=1)
    async def address(self, replica: str) -> str:
        """Nothing is loaded: Serve's routers send a call that names this model, the replica's id, to the one replica that has it."""
        return replica

    async def answer(self, order: bytes) -> bytes:
        """An order of a gateway, to its end (frames.Order, frames.Settled)."""
        assert self._hub is not None
        return await self._hub.answer(order)

    async def card(self) -> bytes:
        """What a gateway has to know of this replica (frames.Card). Raises NotReady where it takes no calls."""
        if self._hub is None or self.state != "serving":
            raise self._shut.refusal
        opened = self.served.opened
        assert isinstance(opened, loading.Opened)
        return self._hub.card(self.config, opened, self._user_config)

    async def drain(self, within_s: float | None = None) -> None:
        """As Replica's; gateways are told."""
        if self._hub is not None:
            self._hub.leave(within_s or 0.0)
        await Replica.drain(self, within_s)

    _hub: Hub | None = None
    _leaving = False
    _export: asyncio.Task[None] | None = None

    async def replica_metrics(self) -> tuple[str, bytes]:
        """This replica's number and its own part of `/metrics`."""
        number = str(serve.get_replica_context().rank.rank)
        self.telemetry.base = (self.name, number)  # Serve numbers anew when replicas go
        return number, self.telemetry.text()

    async def metrics_text(self) -> bytes:
        """The body of `/metrics`: every replica's series, told apart by `engine`, whichever of them is asked."""
        texts = dict([await self.replica_metrics()])
        try:
            texts |= dict(answer for answer in await self._everybody("replica_metrics") if not isinstance(answer, BaseException))
        except Exception as wrong:
            log.warning("/metrics holds this replica only, the others did not answer: %r", wrong)
        return merged(texts.values())

    async def replica_forget_prefixes(self) -> int:
        """Empty this replica's prefix cache."""
        return await super().forget_prefixes()

    async def forget_prefixes(self) -> int:
        """Empty the prefix cache of every replica. Raises where one does not answer: what it knows is still known."""
        answers = [await self.replica_forget_prefixes(), *await self._everybody("replica_forget_prefixes")]
        silent = [answer for answer in answers if isinstance(answer, BaseException)]
        if silent:
            raise RayNeuronError(f"{len(silent)} replicas did not answer and may still know prefixes: {silent[0]!r}")
        return sum(answers)

    async def _everybody(self, method: str) -> Sequence[Any]:
        """What every replica, this one too, answers to a call of a method, or what it raised."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        # From an empty context: Serve takes calls made inside one request for the same call.
        asked = contextvars.Context().run(handle.broadcast, method)
        return await asked.results_async(timeout_s=PEERS_S, return_exceptions=True)

    def _publish(self, progress: str) -> None:
        readiness.publish(serve.get_replica_context().app_name, progress)

    async def __serve_build_asgi_app__(self) -> Starlette:
        return application(self, echo_request_id=False)

    async def __del__(self) -> None:
        if self._export is not None:
            self._export.cancel()
        if self._hub is not None:
            await self._hub.close()
        await self.close()


def build(args: dict) -> Application:
    """The application of one model. `args` are config.Deployment's keys.

    Raises Refused, a ConfigError, for whatever a replica would refuse: a wrong update ends here, and what ran before runs on.
    """
    try:
        config = deployment.parse(args)
        for note in preflight.inspect(config, _able(config)):
            log.warning("%s: %s", config.model.served_name, note)
        return application_of(config)
    except RayNeuronError as wrong:
        raise Refused(wrong.message, param=wrong.param) from None


class Refused(ConfigError, RayServeException):
    """What the builder refuses. As one of Serve's own errors it is said in one line, and not tried again."""


def _able(config: Deployment) -> bool:
    """Whether the node this runs on could hold a replica: only there is what is missing wrong."""
    if not devices.installed(config.device) or not ray.is_initialized():
        return devices.installed(config.device)
    here = ray.get_runtime_context().get_node_id()
    resources: Mapping[str, float] = next((node["Resources"] for node in ray.nodes() if node["NodeID"] == here), {})
    return all(resources.get(name, 0) >= amount for name, amount in layout_of(config).bundles[0].items())


def application_of(config: Deployment, opener: Opener = loading.open_engine) -> Application:
    """As `build`, with another way to open the engine."""
    placement = placement_of(config)
    serving = config.serving
    scaling = serving.autoscaling.model_dump(exclude_unset=True) if serving.autoscaling is not None else None
    scale = {"autoscaling_config": scaling} if scaling is not None else {"num_replicas": serving.num_replicas or 1}
    wanted = serve.deployment(
        ServedEngine,
        name="EngineServer",
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=serving.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=CONSTRUCTOR_RETRIES,
        **placement,
        **scale,
    )
    arguments = config.model_dump(exclude_unset=True)
    return wanted.bind(arguments) if opener is loading.open_engine else wanted.bind(arguments, opener)


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
    return {
        "ray_actor_options": worker_options(layout, layout.workers[0]),
        "placement_group_bundles": [dict(bundle) for bundle in layout.bundles],
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
    ours = logging.getLogger("rayneuron")
    ours.setLevel(logging.INFO)
    ours.handlers = list(logging.getLogger("ray.serve").handlers)
    ours.propagate = False
