"""One model behind a gateway: its replicas, and how calls are read for it, from the first card that one shows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Protocol

from rayneuron import config as deployment
from rayneuron.api import openai
from rayneuron.config import Limits
from rayneuron.errors import ConfigError, NotReady, RayNeuronError
from rayneuron.frames import Card, Standing
from rayneuron.gateway.asking import desk_limits, shares_of
from rayneuron.gateway.attendance import Attends
from rayneuron.gateway.known import Seen
from rayneuron.gateway.remote import RemoteEngine
from rayneuron.gateway.routed import RETRY_S, Routed
from rayneuron.gateway_config import GatewayConfig, Listed, drift
from rayneuron.loading import read_text
from rayneuron.policies.desk import GatewayDesk
from rayneuron.serve.flight import Flights
from rayneuron.serve.handles import Handles
from rayneuron.serve.hot import hot
from rayneuron.serve.served import around
from rayneuron.serve.startup import events_per_s
from rayneuron.serve.telemetry import Load, Telemetry, merged
from rayneuron.serve.verbs import Entrance, Json, Shut, Verbs

log = logging.getLogger(__name__)

LOOK_S = 5.0  # how often the replicas of a model are asked who they are
CHANGING_S, SOON_S = 60.0, 0.5  # and for so long after one has come or gone
COUNTED = ("autoscaling", "drain_timeout_s", "num_cpus", "num_replicas", "wait_for_nodes")  # of `serving`: Serve's business alone


class Replicas(Attends, Protocol):
    """The way to the replicas of one application: `gateway.dispatch`."""

    async def cards(self) -> list[Card]:
        """Of every replica that takes calls now."""

    async def coming(self) -> bool:
        """Whether one starts, where there is none."""

    async def all(self, method: str) -> list[object]:
        """What every replica answers to a call of a method, or what it raised."""


class CatalogueEntry(Handles):
    """A model of the catalogue; a `Server` of its own. Where its application is deployed anew with other words, calls that came before end
    as they began."""

    def __init__(
        self, listed: Listed, gateway: GatewayConfig, replicas: Replicas, label: str, account: Callable[[Mapping[bytes, bytes]], str]
    ) -> None:  # fmt: skip
        self.name = listed.title
        self.door: Entrance = gateway.serving
        self.keys: tuple[bytes, ...] = ()
        self._account = account
        self.telemetry = Telemetry(self.name, label, self.load)
        self.now: Verbs = self._shut("is still loading")
        self.replicas, self.read = replicas, read_text
        self._listed, self._gateway = listed, gateway
        self._eras: dict[str, Routed] = {}  # by the application's words, the newest last
        self._user_config: dict[str, Any] | None = None
        self.left: NotReady | None = None  # why no call is taken any more
        self.standing: Standing | None = None  # of a model that may sleep
        self._looking, self._looks, self._news = asyncio.Lock(), 0, asyncio.Event()
        self._there: set[bytes] = set()  # replicas that were connected at the last look
        self._changed_s = 0.0
        self._doubting: set[asyncio.Task[None]] = set()
        self._looked = asyncio.Event()  # once

    @property
    def names(self) -> Sequence[str]:
        """What clients call it."""
        era = self.now if isinstance(self.now, Routed) else self.newest
        config = self._listed.deployment if era is None else era.config
        return tuple(dict.fromkeys((*(() if config is None else config.model.served_names), self.name)))

    @property
    def adapters(self) -> Mapping[str, str]:
        """What clients call its adapters."""
        config = self._listed.deployment
        asleep = {} if config is None or config.lora is None else config.lora.modules
        return asleep if self.newest is None else self.newest.context.adapters()

    @property
    def newest(self) -> Routed | None:
        """What answers, or would where a replica was there."""
        return next(reversed(self._eras.values()), None)

    @property
    def engines(self) -> list[RemoteEngine]:
        """Where its calls are."""
        return [era.remote for era in self._eras.values()]

    @property
    def state(self) -> str:
        """As /v1/models says it."""
        if isinstance(self.now, Routed) and self.now.remote.fleet.able:
            return "ready"
        return "loading" if self.standing is None or self.standing.state == "ready" else self.standing.state

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return any(engine.pending() for engine in self.engines)

    def account(self, key: bytes) -> str | None:
        """Who has come this far has shown a key."""
        return ""

    async def keep(self) -> None:
        """Follow the replicas until told to end."""
        while True:
            try:
                await self.look()
            except RayNeuronError as wrong:
                self._close_door(wrong.message)
            except Exception as wrong:  # of Serve, whose controller may be on its way back
                log.warning("%s: its replicas could not be asked: %r", self.name, wrong)
            there = {linked.link.card.epoch for engine in self.engines for linked in engine.fleet.able}
            if there != self._there:
                self._there, self._changed_s = there, time.monotonic()
            await asyncio.sleep(LOOK_S if there and time.monotonic() - self._changed_s > CHANGING_S else SOON_S)

    async def look(self) -> None:
        """Ask who is there now, one at a time: whoever waited while another one began has been told by that."""
        before = self._looks
        async with self._looking:
            if self._looks <= before:
                self._looks += 1
                await self._look()

    async def _look(self) -> None:
        cards = await self.replicas.cards()
        for card in cards:
            key = _words(card)
            if key not in self._eras:
                self._eras[key] = await self._begin(card)
            if card.user_config != self._user_config:
                self._changed(key, card)
        for key, era in self._eras.items():
            own = [card for card in cards if _words(card) == key]
            if not own and len(era.flights):  # what its replicas left goes on where the model is the same
                own = [card for card in cards if _alike(card, era.remote.known)]
            era.remote.fleet.roster(own)
        if not cards and self.newest is not None and not self.newest.remote.fleet.able:
            self.newest.remote.expecting = await self.replicas.coming()
        self._choose()
        for key, era in list(self._eras.items()):
            over = not len(era.flights) and era not in (self.now, self.newest) and key not in map(_words, cards)
            if over and self._eras.pop(key, None) is not None:
                await era.close()
        self._looked.set()

    async def settle(self) -> None:
        """Return once its replicas have been looked for, and one is connected where there are any."""
        await self._looked.wait()
        while self.newest is not None and self.newest.remote.fleet.workers and not self.newest.remote.fleet.able:
            await self.joined(SOON_S)

    def _choose(self) -> None:
        """Have what takes orders answer, else what has replicas or will have some."""
        if self.left is not None:
            return
        eras = list(self._eras.values())
        taking = [era for era in eras if any(linked.accepting for linked in era.remote.fleet.able)]
        there = taking or [era for era in eras if era.remote.fleet.able] or [era for era in eras[-1:] if era.remote.expecting]
        self.now = there[-1] if there else self._shut("has no replica that is ready" if eras else "is still loading")

    def _joined(self) -> None:
        """A replica is connected: what waits for one goes now, not when the next look ends."""
        self._choose()
        self._news.set()
        self._news = asyncio.Event()

    def _doubt(self) -> None:
        """A replica leaves, or Serve has it no more: whoever comes in its place is looked for soon."""
        self._changed_s = time.monotonic()
        self._choose()
        task = asyncio.get_running_loop().create_task(self._look_again())
        self._doubting.add(task)
        task.add_done_callback(self._doubting.discard)

    async def _look_again(self) -> None:
        try:
            await self.look()
        except Exception as wrong:  # `keep` says so where it stays that way
            log.info("%s: its replicas could not be asked: %r", self.name, wrong)

    async def joined(self, within_s: float) -> None:
        """Wait for a replica to be connected, no longer than so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), within_s)

    async def _begin(self, card: Card) -> Routed:
        config = deployment.parse(card.args)
        if self._listed.name is None and self._listed.args is not None and (key := drift(deployment.parse(self._listed.args), config)):
            raise ConfigError(f"models: {key} of {self.name} is not what its application says; deploy both from one file")
        text, path = await self.read(config)
        flights = Flights(self.telemetry, asyncio.get_running_loop(), events_per_s(config))
        desk = GatewayDesk(desk_limits(self._gateway), Random(), shares_of(self._gateway))
        engine = RemoteEngine(self.replicas, flights.dispatch, text.eos_ids, self._gateway.replay, desk)
        flights.engine = engine
        engine.fleet.card, engine.welcome, engine.doubt = card, self._joined, self._doubt
        seen = Seen(engine, text, path, card.generation, card.chosen)
        made = around(Routed, config, seen, engine, flights, self.telemetry, None, lambda: self.now.limits, card.user_config)
        self._user_config = card.user_config
        return self._named(made)

    def _named(self, era: Routed) -> Routed:
        """With every name it answers to."""
        config = era.config.model
        names = tuple(dict.fromkeys((*config.served_names, self.name)))
        any_name = config.any_name or (self._gateway.any_name and self._gateway.default == self.name)
        context = replace(era.context, models=names, any_name=any_name)
        return replace(era, context=context, account=self._account, explain=self._gateway.explain)

    def _changed(self, key: str, card: Card) -> None:
        """The replicas have taken another user_config."""
        era = self._eras[key]
        read = hot(era.config, era.opened, card.user_config, self.telemetry)
        self._eras[key] = self._named(replace(era, context=read.context, limits=read.limits))
        self._user_config = card.user_config

    def _shut(self, why: str) -> Shut:
        return Shut(f"{self.name} {why}", Limits.model_construct(retry_after_s=RETRY_S))

    def _close_door(self, why: str) -> None:
        log.error("%s: %s", self.name, why)
        self.now = self._shut(f"cannot be served: {why}")

    def leave(self, why: str) -> None:
        """Refuse new calls from now on."""
        self.now = shut = self._shut(why)
        self.left = shut.refusal

    async def end(self, within_s: float, error: RayNeuronError) -> None:
        """Let the open calls finish for so long, then end the others."""
        await asyncio.gather(*(era.end(within_s, error) for era in self._eras.values()))

    async def close(self) -> None:
        """End what is left."""
        while self._eras:  # a look that is under way may add one, or take one away
            await self._eras.popitem()[1].close()

    def load(self) -> Load:
        """What is under way, here and in the replicas. Raises NotReady."""
        if self.newest is None:
            raise self._shut("is still loading").refusal
        return self.newest.load()

    def cards(self) -> list[Json]:
        """As /v1/models lists it."""
        newest = self.newest
        listed = newest.cards() if newest is not None else [openai.model_card(self.name, created=0, max_model_len=0)]
        eta = {} if self.standing is None else {"eta_s": self.standing.eta_s}
        return [{**card, "rayneuron": {"state": self.state, **eta}} for card in listed]

    async def metrics_text(self) -> bytes:
        """The body of `/metrics`: its replicas'."""
        return merged(text for _, text in await self.texts())

    async def texts(self) -> list[tuple[str, bytes]]:
        """What each replica measures."""
        answers = await self.replicas.all("replica_metrics")
        return [answer for answer in answers if isinstance(answer, tuple | list)]  # type: ignore[misc]

    async def forget_prefixes(self) -> int:
        """Empty the prefix caches of all its replicas. Raises where one does not answer."""
        answers = await self.replicas.all("replica_forget_prefixes")
        silent = [answer for answer in answers if not isinstance(answer, int)]
        if silent:
            raise RayNeuronError(f"{len(silent)} replicas of {self.name} did not answer and may still know prefixes: {silent[0]!r}")
        return sum(answer for answer in answers if isinstance(answer, int))


def _words(card: Card) -> str:
    """What an application says of its model, and not of how many replicas there are."""
    serving = {key: said for key, said in card.args.get("serving", {}).items() if key not in COUNTED}
    return json.dumps({**card.args, "serving": serving}, sort_keys=True)


def _alike(card: Card, known: Card) -> bool:
    """Whether a request that was begun by one may go on at the other."""
    same = card.model is not None and (card.model, card.vocab) == (known.model, known.vocab)
    return same and card.length >= known.length and known.adapters.items() <= card.adapters.items()
