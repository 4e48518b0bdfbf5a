"""`rayneuron.gateway.app:build`: the Ray Serve application in front of several models, for `serve run`, `serve deploy` and `serve.run`."""

# No `from __future__ import annotations` here: it would silently switch off Ray's handling of the builder's argument.
import contextvars
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.applications import Starlette

from rayneuron import gateway_config
from rayneuron.deployment_file import GATEWAY
from rayneuron.errors import RayNeuronError
from rayneuron.gateway.catalogue import Catalogue
from rayneuron.gateway.dispatch import Dispatch
from rayneuron.gateway.routes import application
from rayneuron.host.app import arbiter_of
from rayneuron.serve.app import Refused
from rayneuron.serve.deployed import DRAIN_CHECK_S, HEALTH_PERIOD_S, HEALTH_TIMEOUT_S, MAX_ONGOING, log_through_serve, settle_interpreter

SETTLE_S = 3.0  # Serve sends a gateway calls from its first moment: it may wait so long for the replicas that are there


@serve.ingress()
class ServedGateway(Catalogue):
    """A Catalogue as a Serve deployment: its own ASGI ingress, bound late."""

    async def __init__(self, config: Mapping[str, Any], arbiter: Any = None) -> None:  # type: ignore[misc]
        log_through_serve()
        calls = None if arbiter is None else HostCalls(arbiter)
        Catalogue.__init__(self, config, Dispatch, str(serve.get_replica_context().rank.rank), calls)
        await self.open(SETTLE_S)
        settle_interpreter()

    def check_health(self) -> None:
        """For Serve: a gateway lives while its event loop answers."""

    async def __serve_build_asgi_app__(self) -> Starlette:
        return application(self, echo_request_id=False)

    async def __del__(self) -> None:
        await self.close()


class HostCalls:
    """The arbiter, by Serve."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def want(self, blob: bytes) -> bytes:
        """What this gateway wants; how it stands with each model."""
        told: bytes = await contextvars.Context().run(self._handle.want.remote, blob)
        return told

    async def describe(self) -> dict[str, Any]:
        """Nodes, seats and models."""
        told: dict[str, Any] = await contextvars.Context().run(self._handle.describe.remote)
        return told


def build(args: dict[str, Any]) -> Application:
    """The application of a gateway. `args` are gateway_config.GatewayConfig's keys. Raises Refused, a ConfigError."""
    try:
        config = gateway_config.parse(args)
        arbiter = [] if config.host is None else [arbiter_of(config)]
    except RayNeuronError as wrong:
        raise Refused(wrong.message, param=wrong.param) from None
    serving = config.serving
    wanted = serve.deployment(
        ServedGateway,
        name=GATEWAY,
        num_replicas=serving.replicas,
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=serving.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": serving.num_cpus},
    )
    return wanted.bind(config.model_dump(exclude_unset=True), *arbiter)
