"""The models behind a gateway: which one a call means, whose key it shows, and what all of them say together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from msgspec.structs import asdict

from rayneuron import gateway_config, keys
from rayneuron.config import Limits
from rayneuron.errors import NotReady, RequestError, UnknownModel
from rayneuron.gateway.entry import CatalogueEntry
from rayneuron.gateway.measures import Collector, HostMeasured, Measured
from rayneuron.gateway.measures import text as own_text
from rayneuron.gateway.waking import ArbiterCalls, SeatReplicas, SeatWay, Sleeper, Waking
from rayneuron.gateway_config import NOBODY, GatewayConfig
from rayneuron.serve.handles import Handles, stats_of
from rayneuron.serve.telemetry import Load, Telemetry, merged
from rayneuron.serve.verbs import Json, Shut, Verbs
from rayneuron.types import SamplingParams, Snapshot

log = logging.getLogger(__name__)

DESCRIBE_S = 2.0  # for the arbiter to say how the host stands


class Catalogue(Handles):
    """A gateway without Ray. Its methods are what other Ray applications call; `gateway.routes` puts HTTP in front of it."""

    def __init__(
        self, config: Mapping[str, Any] | GatewayConfig, follow: Callable[[str], SeatWay], label: str = "0",
        arbiter: ArbiterCalls | None = None,
    ) -> None:  # fmt: skip
        self.config = gateway_config.parse(config)
        self.label = label
        self.door = self.config.serving
        self.telemetry = Telemetry("gateway", label, self.load)
        self.now: Verbs = Shut("the gateway has no model yet", Limits.model_construct())
        self._keys = keys.by_account(self.config.key_sources)
        self.keys = tuple(key for known in self._keys.values() for key in known)
        self.entries, sleepers = [], {}
        for listed in self.config.models:
            ways = SeatReplicas(follow) if listed.name is not None else follow(listed.title)
            self.entries.append(CatalogueEntry(listed, self.config, ways, label, self._whose))
            if isinstance(ways, SeatReplicas):
                sleeper = sleepers[listed.title] = Sleeper(gateway_config.hosted_model(self.config, listed.title), self.entries[-1], ways)
                self.entries[-1].read = sleeper.read
        self.arbiter = arbiter
        self.waking = Waking(self.config, sleepers, arbiter) if arbiter is not None else None
        self._keeping: list[asyncio.Task[None]] = []

    async def open(self, within_s: float = 0.0) -> None:
        """Begin to follow the replicas; wait, but only so long, until those that are there are connected."""
        self._keeping = [asyncio.create_task(entry.keep()) for entry in self.entries]
        if self.waking is not None:
            self._keeping.append(asyncio.create_task(self.waking.keep()))
        settling = [asyncio.create_task(entry.settle()) for entry in self.entries]
        _, late = await asyncio.wait(settling, timeout=within_s)
        for task in late:
            task.cancel()

    def account(self, key: bytes) -> str | None:
        """Whose a key is; None for a wrong one. Every account is compared."""
        found = [name for name, known in self._keys.items() if keys.accepts(known, key)]
        return NOBODY if not self._keys else found[0] if found else None

    def _whose(self, headers: Mapping[bytes, bytes]) -> str:
        """Whose a call is that has come in."""
        return self.account(keys.shown(headers)) or NOBODY

    def decisions(self, most: int) -> list[Json]:
        """The last orders of each model, the newest first: where they went, and why there."""
        if not self._keys and not self.config.explain:
            raise RequestError("this gateway does not say where calls go; write explain: true, or keys that may ask")
        found = []
        for entry in self.entries:
            for send in [send for engine in entry.engines for send in engine.desk.recent][: -most - 1 : -1]:
                found.append({"model": entry.names[0], "order": send.number, "waited_ms": 1e3 * send.waited_s, **asdict(send.terms)})
        return found

    async def hosts(self) -> Json:
        """Nodes, seats and models of the host."""
        if self.arbiter is None:
            raise RequestError("this gateway has no host: none of its models may sleep")
        if not self._keys and not self.config.explain:
            raise RequestError("this gateway does not say what its host does; write explain: true, or keys that may ask")
        return await self.arbiter.describe()

    def named(self, name: str | None, here: str = "model") -> CatalogueEntry:
        """The model of a name, or of one of its adapters, the default one's where there is none. Raises UnknownModel, which tells those
        there are, and RequestError where several have the adapter."""
        wanted = self.config.default if name is None else name
        found = [entry for entry in self.entries if wanted in entry.names]
        if not found and here == "model":
            found = [entry for entry in self.entries if wanted in entry.adapters]
            if len(found) > 1:
                ways = " or ".join(f"/m/{entry.names[0]}/" for entry in found)
                raise RequestError(f"several models have an adapter `{name}`; call it under {ways}", param=here)
        if not found and self.config.any_name:
            found = [entry for entry in self.entries if self.config.default in entry.names]
        if found:
            return found[0]
        there = [entry.names[0] for entry in self.entries]
        if name is None:
            raise UnknownModel(f"several models are served here, and none by default; name one as `model`: {', '.join(there)}", param=here)
        raise UnknownModel.named(name, there, here)

    # What other Ray applications call.

    async def chat(self, body: Json) -> Json | AsyncIterator[Json]:
        """As that of a model, which the body names."""
        return await self._of(body).chat(body)

    async def completions(self, body: Json) -> Json | AsyncIterator[Json]:
        """As that of a model, which the body names."""
        return await self._of(body).completions(body)

    async def generate(
        self, prompt: str | list[int] | Json, params: SamplingParams | Json | None = None, model: str | None = None
    ) -> AsyncIterator[Json]:
        """As that of a model, named by `model`, or by the body where `prompt` is one."""
        named = prompt.get("model") if isinstance(prompt, Mapping) else None
        async for piece in self.named(model or named).generate(prompt, params):
            yield piece

    async def tokenize(self, body: Json) -> Json:
        """As that of a model, which the body names."""
        return await self._of(body).tokenize(body)

    async def detokenize(self, body: Json) -> Json:
        """As that of a model, which the body names."""
        return await self._of(body).detokenize(body)

    async def models(self) -> Json:
        """As /v1/models says it, those that load included."""
        return {"object": "list", "data": [card for entry in self.entries for card in entry.cards()]}

    async def stats(self) -> Json:
        """The calls in flight, and the load of each model that has one."""
        load = self.load()
        models = {entry.names[0]: stats_of(entry) for entry in self.entries if entry.newest is not None}
        return {"open_calls": load.calls, "open_sequences": load.sequences, "models": models}

    def _of(self, body: Json) -> CatalogueEntry:
        return self.named(body.get("model"))

    # What a server says.

    def load(self) -> Load:
        """The calls in flight of all models."""
        loads = [entry.load() for entry in self.entries if entry.newest is not None]
        return Load(Snapshot(), sum(load.calls for load in loads), sum(load.sequences for load in loads))

    def health(self) -> None:
        """Raise where no model can answer."""
        for entry in self.entries:
            if entry.state == "ready" or (entry.standing is not None and not entry.standing.failed):
                return
        raise NotReady("no model behind this gateway is ready", retry_after_s=2.0)

    async def metrics_text(self) -> bytes:
        """The body of `/metrics`: the replicas' families, and this gateway's own."""
        told, host = await asyncio.gather(asyncio.gather(*(entry.texts() for entry in self.entries), return_exceptions=True), self._host())
        texts = [text for each in told if not isinstance(each, BaseException) for _, text in each]
        mine: list[Collector] = [Measured(e.names[0], self.label, e.telemetry, e.engines) for e in self.entries]
        return merged([*texts, own_text([*mine, *host])])

    async def _host(self) -> list[HostMeasured]:
        """What is measured of the host; nothing while its arbiter does not answer."""
        if self.arbiter is None or self.waking is None:
            return []
        try:
            told = await asyncio.wait_for(self.arbiter.describe(), DESCRIBE_S)
        except Exception as wrong:
            log.warning("/metrics says nothing of the host, whose arbiter does not answer: %r", wrong)
            return []
        return [HostMeasured(told, self.label, self.waking.refused)]

    async def forget_prefixes(self) -> int:
        """Empty the prefix caches of all models."""
        return sum(await asyncio.gather(*(entry.forget_prefixes() for entry in self.entries)))

    def leave(self) -> None:
        """Refuse new calls with 503 from now on."""
        for entry in self.entries:
            entry.leave("is not answered here any more: the gateway is shutting down")

    async def drain(self, within_s: float | None = None) -> None:
        """Leave; running calls finish, those that have not after `within_s` with an error."""
        self.leave()
        if within_s is not None:
            error = NotReady("the gateway is shutting down", retry_after_s=2.0)
            await asyncio.gather(*(entry.end(within_s, error) for entry in self.entries))

    async def close(self) -> None:
        """Leave, and end what is left."""
        self.leave()
        for task in self._keeping:
            task.cancel()
        for entry in self.entries:
            await entry.close()
