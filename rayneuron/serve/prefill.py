"""The prefill pool as a deployment of Ray Serve, and how decode replicas find it."""

from __future__ import annotations

import contextvars
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from rayneuron import config as deployment
from rayneuron import loading
from rayneuron.api.adapters import Change
from rayneuron.serve.deployed import Deployed
from rayneuron.serve.pools import OpensEngine, Prefiller

ANSWER_S = 2.0  # for replicas to answer
KEY = b"rayneuron:pool:"


class PrefillServer(Deployed, Prefiller):
    """A Prefiller as a Serve deployment. Nobody calls it through Serve but decode replicas, which ask where it listens."""

    async def __init__(  # type: ignore[misc]
        self, config: Mapping[str, Any], opener: OpensEngine = loading.open_engine
    ) -> None:
        self._begin()
        context = serve.get_replica_context()
        Prefiller.__init__(self, config, self._opener_of(deployment.parse(config), opener), f"prefill {context.rank.rank}")
        await self._opened(self.open(token_of(context.app_name), ray.util.get_node_ip_address()))
        self._name = context.replica_id.unique_id

    def hello(self) -> tuple[str, tuple[str, ...]]:
        """Its name, and where it listens."""
        return self._name, self.addresses

    def replica_metrics(self) -> tuple[str, bytes]:
        """Its number and its part of `/metrics`."""
        return self.telemetry.base[1], self.telemetry.text()

    async def replica_change_adapters(self, origin: str, *change: Any) -> None:
        """Load or unload an adapter here, too: `origin`, a decode replica, has."""
        await self.change_adapters(Change(*change))

    def check_health(self) -> None:
        """As Prefiller's, and the end where it fails."""
        self._checked(lambda: Prefiller.check_health(self))

    async def __del__(self) -> None:
        self._end()
        if self._engine is not None:
            await self.drain(self.config.serving.drain_timeout_s)
        await self.close()


async def found(handle: Any) -> dict[str, tuple[str, ...]]:
    """The live prefill replicas behind a handle, by name, and where each listens."""
    return dict(answer for answer in await everybody(handle, "hello") if not isinstance(answer, BaseException))


async def everybody(handle: Any, method: str, *arguments: Any, within_s: float = ANSWER_S) -> Sequence[Any]:
    """What every replica of a deployment answers to a call of a method, or what it raised."""
    # From an empty context: Serve takes calls made inside one request for the same call.
    asked = contextvars.Context().run(handle.broadcast, method, *arguments)
    answers: Sequence[Any] = await asked.results_async(timeout_s=within_s, return_exceptions=True)
    return answers


def token_of(application: str) -> bytes:
    """What both pools of an application show each other: drawn once, kept by Ray, never in a file, an argument or a log."""
    _internal_kv_put(KEY + application.encode(), secrets.token_bytes(32), overwrite=False)
    token: bytes = _internal_kv_get(KEY + application.encode())
    return token
