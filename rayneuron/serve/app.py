"""`rayneuron.serve.app:build`: the Ray Serve application of one model, for `serve run`, `serve deploy` and `serve.run`."""

# No `from __future__ import annotations` here: it would silently switch off Ray's handling of the builder's argument.
import asyncio
import gc
import logging
import sys
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.applications import Starlette

from rayneuron import config as deployment
from rayneuron import loading
from rayneuron.config import Deployment
from rayneuron.serve.ingress import application
from rayneuron.serve.replica import EngineServer, Opener
from rayneuron.serve.telemetry import RayExport

log = logging.getLogger(__name__)

MAX_ONGOING = 100_000  # admission is ours: Serve's own queue retries with a back-off of up to half a second
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
DRAIN_CHECK_S = 0.5
CONSTRUCTOR_RETRIES = 2
EXPORT_PERIOD_S = 2.0
SWITCH_INTERVAL_S = 0.001  # the engine thread and the event loop share one interpreter; the default of 5 ms delays every token by as much


@serve.ingress()
class ServedEngine(EngineServer):
    """EngineServer as a Serve deployment: its own ASGI ingress, bound late (an app decorated in a builder loses its routes)."""

    async def __init__(self, config: Mapping[str, Any], opener: Opener = loading.open_engine) -> None:  # type: ignore[misc]
        _log_through_serve()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        EngineServer.__init__(self, config, opener, str(serve.get_replica_context().rank.rank))
        await self.open()
        gc.collect()
        gc.freeze()  # what start-up made lives for ever: a full collection over it would hold every stream for tens of milliseconds
        self._export = asyncio.get_running_loop().create_task(_export(RayExport(self.telemetry)))

    async def __serve_build_asgi_app__(self) -> Starlette:
        return application(self, echo_request_id=False)

    async def __del__(self) -> None:
        if self.ready:
            self._export.cancel()
        await self.close()


def build(args: dict) -> Application:
    """The application of one model. `args` are config.Deployment's keys; ConfigError names a wrong one and the nearest right one."""
    return application_of(deployment.parse(args))


def application_of(config: Deployment, opener: Opener = loading.open_engine) -> Application:
    """As `build`, with another way to open the engine."""
    serving = config.serving
    scale = {"autoscaling_config": serving.autoscaling} if serving.autoscaling else {"num_replicas": serving.num_replicas}
    wanted = serve.deployment(
        ServedEngine,
        name="EngineServer",
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=serving.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=CONSTRUCTOR_RETRIES,
        ray_actor_options={"num_cpus": serving.num_cpus or 1},
        **scale,
    )
    arguments = config.model_dump(exclude_unset=True)
    return wanted.bind(arguments) if opener is loading.open_engine else wanted.bind(arguments, opener)


async def _export(export: RayExport) -> None:
    while True:
        await asyncio.sleep(EXPORT_PERIOD_S)
        try:
            export.push()
        except Exception:
            log.exception("metrics could not be handed to Ray; trying again")


def _log_through_serve() -> None:
    """Send our lines where Serve sends its own: the replica's log file, and the terminal of `serve run`."""
    ours = logging.getLogger("rayneuron")
    ours.setLevel(logging.INFO)
    ours.handlers = list(logging.getLogger("ray.serve").handlers)
    ours.propagate = False
