"""Calls by Ray Serve: to every replica of an application, or to one, by the id it is known under as a multiplexed model."""

from __future__ import annotations

import asyncio
import contextvars
import logging

import msgspec
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from rayneuron.deployment_file import DEPLOYMENT
from rayneuron.frames import Card
from rayneuron.serve import readiness

log = logging.getLogger(__name__)

CARDS_S = 5.0  # for the replicas to show their cards


class Dispatch:
    """The way to the replicas of one application. Its handle is made in the event loop that uses it."""

    def __init__(self, application: str) -> None:
        self.application = application
        self._handle: DeploymentHandle | None = None
        self._directed: dict[str, DeploymentHandle] = {}

    def _open(self) -> DeploymentHandle:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(DEPLOYMENT, self.application)
        return self._handle

    async def cards(self) -> list[Card]:
        """Of every replica that takes calls now; none where there is no such application yet."""
        try:
            asked = contextvars.Context().run(self._open().broadcast, "card")
            shown = await asked.results_async(timeout_s=CARDS_S, return_exceptions=True)
        except RayServeException:
            return []
        cards = [msgspec.msgpack.decode(blob, type=Card) for blob in shown if isinstance(blob, bytes)]
        there = {card.replica for card in cards}
        self._directed = {replica: handle for replica, handle in self._directed.items() if replica in there}
        return cards

    async def coming(self) -> bool:
        """Whether one starts, where there is none: Serve has the application, and has not given it up."""
        state = (await asyncio.to_thread(readiness.look)).get(self.application)
        return state is not None and state.status not in ("DEPLOY_FAILED", "DELETING")

    def knows(self, replica: str) -> bool:
        """Who has shown a card here did so by Serve."""
        return True

    async def early(self) -> Card | None:
        """Of a replica on a seat that has just become ready, though Serve may not know it yet; None where there is none."""
        blob = await asyncio.to_thread(readiness.shown, self.application)
        return msgspec.msgpack.decode(blob, type=Card) if blob else None

    async def attend(self, replica: str, gateway: bytes) -> bool:
        """Wait at a replica. Serve sends what names an unknown one anywhere, where it is False at once."""
        handle = self._directed.get(replica)
        if handle is None:
            handle = self._open().options(method_name="attend", multiplexed_model_id=replica)
            self._directed[replica] = handle
        # From an empty context: calls made inside one request are one to Serve's router, which then may swap them.
        there: bool = await contextvars.Context().run(handle.remote, gateway, replica)
        return there

    async def all(self, method: str) -> list[object]:
        """What every replica answers to a call of a method, or what it raised."""
        asked = contextvars.Context().run(self._open().broadcast, method)
        return list(await asked.results_async(timeout_s=CARDS_S, return_exceptions=True))
