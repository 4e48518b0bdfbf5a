"""What gateways and replicas say to each other over one connection (msgspec structs); only cards travel by Serve."""

from __future__ import annotations

from typing import Any

import msgspec

from rayneuron import errors
from rayneuron.errors import RayNeuronError
from rayneuron.news import KvNews, Pressure
from rayneuron.types import FinishReason, Profile, Request, TokenDelta

VERSION = 5  # raised with every change of a message
MOST_BYTES = 64 * 2**20  # of one frame; prompt_logprobs of a long prompt are megabytes


class Order(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request for one replica. `number` counts a gateway's orders to it from 1. `left_s`, not a deadline: clocks of two hosts differ.

    `waited_s`: how long ago the client asked.
    """

    number: int
    request: Request
    waited_s: float = 0.0
    left_s: float | None = None


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A RayNeuronError that travels as a value."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, wrong: RayNeuronError) -> Refusal:
        """That of an error; a kind of its own travels as the nearest one that `errors` knows."""
        known = next(kind for kind in type(wrong).__mro__ if getattr(errors, kind.__name__, None) is kind)
        return cls(known.__name__, wrong.message, wrong.param, wrong.retry_after_s)

    def error(self) -> RayNeuronError:
        """The error again."""
        kind = getattr(errors, self.kind, RayNeuronError)
        made: RayNeuronError = kind(self.message, param=self.param, retry_after_s=self.retry_after_s)
        return made


class OrderEnded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An order has ended otherwise than by its tokens. Not `refused`: the replica takes none any more, and nothing was done. `failed`: a
    step of it has."""

    order: int
    refused: Refusal | None = None
    failed: bool = False


class Greeting(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """First words of a gateway. `token`, `epoch`: those of the replica's card."""

    gateway: bytes
    token: bytes
    epoch: bytes
    version: int = VERSION


class Reception(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """First words of a replica. Without an epoch: it has none of what was asked for, and closes."""

    epoch: bytes
    pressure: Pressure = Pressure(accepting=False)
    version: int = VERSION


class Alive(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A gateway is there. `waiting_ms`: of work that waits at it, this replica's part."""

    waiting_ms: float = 0.0


class Cancel(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An order, or one choice of it, is not wanted any more; `reason`: a stop string has ended it, or its client has gone."""

    order: int
    index: int | None
    reason: FinishReason


class Gain(msgspec.Struct, array_like=True, frozen=True):
    """What a step adds to a choice of an order. `at`: output tokens before these, those that came with the order included."""

    order: int
    at: int
    delta: TokenDelta


class Tokens(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a step adds to all orders of a gateway, and how busy the replica is now and then. `number` counts by one."""

    number: int
    pieces: list[Gain]
    pressure: Pressure | None = None


class Leaving(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The replica takes no more orders; those it has go on for so long. `failed`: not at all, since a step has failed or does not end."""

    within_s: float
    failed: bool = False


class KvEvents(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Which prefixes the replica has KV of, since the last time."""

    news: KvNews


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway has to know of a replica. Travels through Ray only: `token` opens the connection.

    `args`, `user_config`: the deployment's own words. `model`: its fingerprint, where prefixes are kept, in blocks of `block` tokens.
    `profile`: what its steps take, where they have been measured. `adapters`: contents by name.
    """

    replica: str
    epoch: bytes
    address: str
    token: bytes
    args: dict[str, Any]
    user_config: dict[str, Any] | None
    rows: int
    length: int
    kv_tokens: int
    block: int
    vocab: int
    model: str | None
    profile: Profile | None
    generation: dict[str, Any]
    chosen: dict[str, Any]
    adapters: dict[str, str]


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway has for one model of the host: `waiting` calls without a seat, the first for `oldest_s`; `arrived` since it last said
    so; `backlog_s` of work at its seats; `busy`: of those that have any, in seconds, by application."""

    waiting: int = 0
    oldest_s: float = 0.0
    arrived: int = 0
    backlog_s: float = 0.0
    busy: dict[str, float] = {}


class Wanting(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway has for all models of the host."""

    gateway: bytes
    models: dict[str, Asked]


class Standing(msgspec.Struct, frozen=True):
    """How it stands with a model of the host. `seats`: applications that take its orders; `coming`: those that start; `eta_s` None: nobody
    can say; `why` it is not there, `failed`: the last start's reason."""

    state: str
    seats: list[str] = []
    coming: list[str] = []
    eta_s: float | None = None
    why: str = ""
    failed: str = ""


FromGateway = Greeting | Alive | Cancel | Order
FromReplica = Reception | Tokens | KvEvents | Leaving | OrderEnded
