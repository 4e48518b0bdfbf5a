"""What answers calls, as HTTP and handles see it: six verbs. One model's replica speaks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol, TypeVar

from rayneuron.api import call as api
from rayneuron.api.call import Json as Json
from rayneuron.config import Deployment, Limits
from rayneuron.policies import admission
from rayneuron.serve.flight import Flight
from rayneuron.serve.telemetry import Load, Telemetry
from rayneuron.serve.text_thread import TextThread

Result = TypeVar("Result")
Read = Callable[[Json, api.Context], Result]
NO_HEADERS: Mapping[bytes, bytes] = MappingProxyType({})


class Verbs(Protocol):
    """Each verb raises NotReady where no call can be taken, `load` only where there is nothing to say yet."""

    config: Deployment
    keys: tuple[bytes, ...]
    telemetry: Telemetry
    text_thread: TextThread

    @property
    def limits(self) -> Limits: ...

    def admit(self, call: admission.Demand = admission.LEAST) -> None:
        """Raise what the admission policy says to `call`; by default the least there is, before any work is spent. O(1)."""

    async def parse(self, read: Read[Result], body: bytes | Json) -> Result:
        """What `read` makes of a body's fields. Long bodies are read on another thread, so that running streams do not stutter."""

    def flight(
        self, call: api.Call, arrival_s: float, time_limit_s: float | None, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> AbstractContextManager[Flight]:
        """A call on its way through the engine; on leaving, whatever is unfinished is aborted. `headers` may hold a trace to continue."""

    def cards(self, *names: str) -> list[Json]:
        """The names served here, as /v1/models lists them; `names`: more, where any name is answered."""

    def health(self) -> None:
        """Raise where the engine is dead, or has had work for `stall_timeout_s` without finishing a step. Takes no lock."""

    def load(self) -> Load:
        """The engine's snapshot and the calls in flight."""

    async def metrics_text(self) -> bytes:
        """The body of `/metrics`."""
