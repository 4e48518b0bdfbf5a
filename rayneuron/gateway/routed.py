"""A model whose engine is elsewhere, complete from the first call to the last: `serve.served` with the verbs of a gateway."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rayneuron.api import call as api
from rayneuron.errors import NotReady
from rayneuron.gateway.asking import wishes_of
from rayneuron.gateway.remote import RemoteEngine
from rayneuron.policies import admission
from rayneuron.serve.flight import Flight
from rayneuron.serve.served import Served
from rayneuron.serve.verbs import NO_HEADERS

ROUTE = "x-rayneuron-route"  # the header that says where a reply came from, and why from there
RETRY_S = 2.0  # what a client is told where no replica is there


@dataclass(frozen=True)
class Routed(Served):
    """A model whose engine is elsewhere. `account`: whose call it is, by its headers; `explain`: every reply says where it came from."""

    account: Callable[[Mapping[bytes, bytes]], str] = lambda headers: ""
    explain: bool = False

    @property
    def remote(self) -> RemoteEngine:
        """That engine."""
        assert isinstance(self.engine, RemoteEngine)
        return self.engine

    def admit(self, call: admission.Demand = admission.LEAST) -> None:
        """As the verb; where no replica is there and one comes, the call may wait for it."""
        if not self.remote.expecting:
            self.health()
        super().admit(call)

    @contextlib.contextmanager
    def flight(
        self, call: api.Call, arrival_s: float, time_limit_s: float | None, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> Iterator[Flight]:
        """As the verb."""
        said: dict[str, str] = {}
        wanted = self.explain or headers.get(b"x-rayneuron-explain") == b"1"
        wishes = wishes_of(headers, self.account(headers), (lambda line: said.update({ROUTE: line})) if wanted else None)
        for request in call.requests:
            self.remote.wishes[request.id] = wishes
            request.trace = headers.get(b"traceparent", b"").decode("latin-1")
        try:
            with super().flight(call, arrival_s, time_limit_s, headers) as flight:
                flight.headers = said
                yield flight
        finally:
            for request in call.requests:
                self.remote.wishes.pop(request.id, None)

    def health(self) -> None:
        """As the verb."""
        if not self.remote.fleet.able:
            raise NotReady(f"no replica of {self.config.model.served_name} is ready", retry_after_s=RETRY_S)
