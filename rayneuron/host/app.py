"""The arbiter as a deployment of the gateway's application."""

# No `from __future__ import annotations` here: Serve looks at the signatures.
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from rayneuron import gateway_config
from rayneuron.deployment_file import ARBITER
from rayneuron.gateway_config import GatewayConfig
from rayneuron.host.arbiter import Arbiter
from rayneuron.host.seats import Keepers, Seats
from rayneuron.placement import hosting
from rayneuron.serve.deployed import HEALTH_PERIOD_S, HEALTH_TIMEOUT_S, log_through_serve


class ServedArbiter(Arbiter):
    """An Arbiter over Ray."""

    async def __init__(self, config: Mapping[str, Any]) -> None:  # type: ignore[misc]
        log_through_serve()
        made = gateway_config.parse(config)
        assert made.host is not None
        owner = serve.get_replica_context().app_name
        seats = Seats(owner, made.scaling.orphan_s)
        Arbiter.__init__(self, made, seats, Keepers(made.host.instance, made.host.nodes))
        await self.open()

    async def __del__(self) -> None:
        self.close()


def arbiter_of(config: GatewayConfig) -> Application:
    """The arbiter of a gateway's models that may sleep. Raises ConfigError for those that could never be awake, or not at once."""
    assert config.host is not None
    hosting.check(config.host.instance, config.host.nodes, hosting.wanted_of(config))
    made = serve.deployment(
        ServedArbiter,
        name=ARBITER,
        num_replicas=1,
        max_ongoing_requests=1000,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},
    )
    return made.bind(config.model_dump(exclude_unset=True))
