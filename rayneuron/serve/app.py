"""`rayneuron.serve.app:build`: the Ray Serve application of one model, for `serve run`, `serve deploy` and `serve.run`."""

# No `from __future__ import annotations` here: it would silently switch off Ray's handling of the builder's argument.
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette

from rayneuron import config as deployment
from rayneuron import devices, loading, preflight
from rayneuron.api.adapters import Change
from rayneuron.config import Deployment
from rayneuron.deployment_file import DEPLOYMENT, PREFILL
from rayneuron.errors import ConfigError, NotReady, RayNeuronError, UnknownModel
from rayneuron.group_config import prefill_of
from rayneuron.serve import pools, readiness, seated
from rayneuron.serve.answering import Answering
from rayneuron.serve.deployed import Deployed, layout_of, serve_deployment
from rayneuron.serve.ingress import application
from rayneuron.serve.prefill import ANSWER_S, PrefillServer, everybody, found, token_of
from rayneuron.serve.replica import Opener, Replica
from rayneuron.serve.telemetry import merged

log = logging.getLogger(__name__)

@serve.ingress()
class ServedEngine(Answering, Deployed, Replica):
    """A Replica as a Serve deployment: its own ASGI ingress, bound late (an app decorated in a builder loses its routes).

    `prefill`: the handle of those who compute its prompts, where there are pools.
    """

    async def __init__(  # type: ignore[misc]
        self, config: Mapping[str, Any], opener: Opener = loading.open_engine, prefill: Any = None
    ) -> None:
        self._begin()
        self._prefill = prefill
        opener = self._opener_of(deployment.parse(config), opener)
        Replica.__init__(self, config, opener, str(serve.get_replica_context().rank.rank))
        name, seat = serve.get_replica_context().app_name, self.config.serving.seat
        if seat is not None:
            readiness.forget(name)  # what one before it on this seat has shown
        await self._opened(self.open())
        if seat is not None and self.state == "serving":
            readiness.show(name, await self.card())
            self._tasks.append(self._event_loop.create_task(seated.end_with_owner(seat)))

    async def _prepare(self) -> None:
        await super()._prepare()
        await self.listen()
        self._tasks.append(self._event_loop.create_task(self.leave_with_serve()))
        self._routes = application(self, echo_request_id=False)

    async def retire(self, within_s: float) -> None:
        """Let the calls end as `drain` does, then give the engine back: its cores are free before Serve has taken this replica away."""
        readiness.forget(serve.get_replica_context().app_name)
        await self.drain(within_s)
        await self.close()

    async def start_seconds(self) -> dict[str, float]:
        """What each part of the start took."""
        opened = self.served.opened
        return dict(opened.seconds) if isinstance(opened, loading.Opened) else {}

    def equip(self, opened: loading.Opened) -> None:
        """As Replica's: let the prefill pool compute prompts."""
        if self._prefill is not None:
            pulls = pools.borrow(self.config, opened, token_of(serve.get_replica_context().app_name))
            following = pools.follow(pulls, lambda: found(self._prefill))
            self._event_loop.call_soon_threadsafe(lambda: self._tasks.append(self._event_loop.create_task(following)))

    def check_health(self) -> None:
        """As Replica's, and the end where it fails."""
        self._checked(lambda: Replica.check_health(self))

    async def _farewell(self) -> None:
        served = self._served
        if served is None:
            return await Deployed._farewell(self)
        self.hand_over(0.0, failed=True)
        self.leave()
        await served.end(0.0, NotReady("this replica has failed and is being replaced", retry_after_s=5.0))

    async def replica_metrics(self) -> tuple[str, bytes]:
        """This replica's number and its own part of `/metrics`."""
        number = str(serve.get_replica_context().rank.rank)
        self.telemetry.base = (self.name, number)  # Serve numbers anew when replicas go
        return number, self.telemetry.text()

    async def metrics_text(self) -> bytes:
        """The body of `/metrics`: every replica's series, told apart by `engine`, whichever of them is asked."""
        texts = dict([await self.replica_metrics()])
        try:
            answers = await self._everybody("replica_metrics")
            texts |= dict(answer for answer in answers if not isinstance(answer, BaseException))
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

    async def replica_change_adapters(self, origin: str, *change: Any) -> None:
        """Load or unload an adapter here, too, unless it is this replica, `origin`, that has told all others."""
        if origin != self._own_id:
            await super().change_adapters(Change(*change))

    async def change_adapters(self, change: Change) -> None:
        """The same on every replica of both pools, first on this one, which says what is wrong. One that comes later has those of the file
        alone."""
        await super().change_adapters(change)
        answers = await self._everybody("replica_change_adapters", self._own_id, *change._replace(replaces=True))
        _followed([answer for answer in answers if not isinstance(answer, UnknownModel)])

    async def replica_load_weights(self, path: str, identity: str, origin: str) -> None:
        """The same weights here, unless it is this replica, `origin`, that was first."""
        if origin != self._own_id:
            await super().load_weights(path, identity)

    async def load_weights(self, path: str, identity: str | None = None) -> str:
        """The same on every replica, first on this one, which says what is wrong. One that comes later has those of the file."""
        found = await super().load_weights(path, identity)
        within_s = self.config.serving.drain_timeout_s + self.config.group.load_s
        _followed(await self._everybody("replica_load_weights", path, found, self._own_id, within_s=within_s))
        return found

    @property
    def _own_id(self) -> str:
        """What tells this replica from the others who hear the same."""
        own: str = serve.get_replica_context().replica_id.unique_id
        return own

    async def _everybody(self, method: str, *arguments: Any, within_s: float = ANSWER_S) -> Sequence[Any]:
        """What every replica of both pools, this one too, answers to a call of a method, or what it raised."""
        context = serve.get_replica_context()
        handles = [serve.get_deployment_handle(context.deployment, context.app_name)]
        handles += [] if self._prefill is None else [self._prefill]
        return [answer for handle in handles for answer in await everybody(handle, method, *arguments, within_s=within_s)]

    def _publish(self, progress: str) -> None:
        readiness.publish(serve.get_replica_context().app_name, progress)

    async def __serve_build_asgi_app__(self) -> Starlette:
        return self._routes

    async def __del__(self) -> None:
        await self.hang_up()
        self._end()
        await self.close()


def _followed(answers: Sequence[Any]) -> None:
    """Raise RayNeuronError where a replica has not made a change that the one which was asked has."""
    if wrong := [answer for answer in answers if isinstance(answer, BaseException)]:
        raise RayNeuronError(f"{len(wrong)} replicas did not follow, and answer as before: {wrong[0]!r}")


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
    wanted = serve_deployment(ServedEngine, DEPLOYMENT, config)
    arguments: list[Any] = [config.model_dump(exclude_unset=True)]
    arguments += [] if opener is loading.open_engine else [opener]
    if config.pools is None:
        return wanted.bind(*arguments)
    there = prefill_of(config)
    prefill = serve_deployment(PrefillServer, PREFILL, there).bind(there.model_dump(exclude_unset=True), *arguments[1:])
    return wanted.bind(*arguments, prefill=prefill)
