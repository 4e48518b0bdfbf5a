"""What answers calls, as HTTP, handles and gateways see it: eight verbs, and the server they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

from rayneuron.api import call as api
from rayneuron.api.call import Json as Json
from rayneuron.config import Limits
from rayneuron.errors import NotReady
from rayneuron.policies import admission
from rayneuron.serve.flight import Flight
from rayneuron.serve.seams import Takes
from rayneuron.serve.telemetry import Load, Telemetry
from rayneuron.types import Delta, Request

Result = TypeVar("Result")
Read = Callable[[Json, api.Context], Result]
NO_HEADERS: Mapping[bytes, bytes] = MappingProxyType({})


class Verbs(Protocol):
    """What a call needs. `limits`: what it is held to."""

    @property
    def limits(self) -> Limits: ...

    def admit(self, call: admission.Demand = admission.LEAST) -> None:
        """Raise what the admission policy says to `call`; by default the least there is, before any work is spent. O(1)."""

    async def parse(self, parse: Callable[..., api.Call], body: bytes | Json, client_id: str | None = None) -> api.Call:
        """A body as a call of its own id, now. Long bodies are read on another thread, so that running streams do not stutter."""

    async def read(self, read: Read[Result], body: bytes | Json) -> Result:
        """What `read` makes of a body that asks for no tokens; as `parse`."""

    def flight(
        self, call: api.Call, arrival_s: float, time_limit_s: float | None, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> AbstractContextManager[Flight]:
        """A call on its way through the engine; on leaving, whatever is unfinished is aborted. `headers` may hold a trace to continue."""

    def carry(
        self, requests: Sequence[Request], reader: Callable[[Request], Takes], arrival_s: float, time_limit_s: float | None,
        headers: Mapping[bytes, bytes] = NO_HEADERS,
    ) -> AbstractContextManager[Flight]:  # fmt: skip
        """Requests on their way, whose tokens `reader` of each takes; as `flight`."""

    async def write(self, call: api.Call, deltas: list[Delta], write: Callable[[Json], Result]) -> Result:
        """The whole reply, as `write` makes it; one with many probabilities is put together on another thread."""

    def cards(self, *names: str) -> list[Json]:
        """The names served here, as /v1/models lists them; `names`: more, where any name is answered."""

    def health(self) -> None:
        """Raise where the engine is dead, or has had work for `stall_timeout_s` without finishing a step. Takes no lock."""


class Shut:
    """The verbs where no call can be taken: each raises NotReady, and says why."""

    def __init__(self, why: str, limits: Limits) -> None:
        self.limits = limits
        self._why = why

    @property
    def refusal(self) -> NotReady:
        """What is raised."""
        return NotReady(self._why, retry_after_s=self.limits.retry_after_s)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self.refusal

    admit = parse = read = flight = carry = write = cards = health = _refuse


class Entrance(Protocol):
    """What a deployment file says of who may call what: `config.Serving`, or a gateway's own section."""

    @property
    def allowed_origins(self) -> list[str]: ...

    @property
    def page(self) -> bool: ...

    @property
    def reset_prefix_cache(self) -> bool: ...


class Server(Protocol):
    """What speaks the verbs: `now`, whatever answers at this moment. `load` raises NotReady where there is nothing to say yet."""

    telemetry: Telemetry
    now: Verbs
    keys: tuple[bytes, ...]  # none: nobody is asked for one

    @property
    def door(self) -> Entrance: ...

    def account(self, key: bytes) -> str | None:
        """Whose a key is; None for a wrong one."""

    def load(self) -> Load:
        """The engine's snapshot and the calls in flight."""

    async def metrics_text(self) -> bytes:
        """The body of `/metrics`."""

    async def forget_prefixes(self) -> int:
        """Empty the prefix cache of every replica; how many blocks they knew."""


@runtime_checkable
class Reweighed(Protocol):
    """A server whose weights may change."""

    async def load_weights(self, path: str) -> str:
        """Those of a directory, on every replica; what they are known by. Raises RequestError, NotReady."""
