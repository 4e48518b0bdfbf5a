"""A decode replica's channel to one prefill replica: connected on a thread of its own, which then says what it hears."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rayneuron import wire
from rayneuron.errors import RayNeuronError
from rayneuron.transfer.layout import KvLayout, differences
from rayneuron.transfer.messages import PREFIX_BYTES, FromP, Knock, Welcome, limit_bytes

log = logging.getLogger(__name__)

CONNECT_S = 2.0
WELCOME_S = 1.0
SEND_S = 0.5  # a channel whose other side does not read is lost


class PrefillPeer:
    """One prefill replica, by `name`, and by a `number` that no other had. `heard` is called with each message, Welcome first, and with
    None when the channel has ended; `refused`: what it differs in. `booked`: tokens it was asked to compute and has not, by key."""

    def __init__(
        self, name: str, addresses: Sequence[str], number: int, token: bytes, layout: KvLayout, heard: Callable[[PrefillPeer, Any], None]
    ) -> None:  # fmt: skip
        self.name, self.addresses, self.number = name, tuple(addresses), number
        self.welcome: Welcome | None = None
        self.refused: list[str] = []
        self.booked: dict[str, int] = {}
        self.pulsed = 0.0
        self._token, self._layout, self._heard = token, layout, heard
        self._channel: wire.Channel[Any] | None = None
        self._closing = False
        threading.Thread(target=self._run, name="rayneuron-peer", daemon=True).start()

    @property
    def queued(self) -> int:
        """Tokens of prompts it was asked for and has not computed."""
        return sum(self.booked.copy().values())

    def say(self, message: Any) -> bool:
        """Send; False where the channel is lost, or would be: whoever says more than can be meant is hung up on."""
        channel, data = self._channel, wire.frame(message, sealed=True)
        if channel is None or self._closing or len(data) > limit_bytes(self._layout):
            return False
        try:
            channel.send_frame(data, SEND_S)
        except (wire.WireError, TimeoutError):
            channel.shutdown()
            return False
        return True

    def close(self) -> None:
        """Hang up."""
        self._closing = True
        if self._channel is not None:
            self._channel.shutdown()

    def _run(self) -> None:
        try:
            self._converse()
        except (wire.WireError, RayNeuronError, TimeoutError) as problem:
            if not self._closing:
                log.warning("prefill replica %s: %s", self.name, problem)
        except OSError as problem:
            log.warning("prefill replica %s: %s", self.name, problem)
        finally:
            self._closing = True
            if self._channel is not None:
                self._channel.close()
            self._heard(self, None)

    def _converse(self) -> None:
        channel = self._channel = self._connect()
        channel.send(Knock(self._token), SEND_S)
        welcome = channel.receive(WELCOME_S)
        if not isinstance(welcome, Welcome):
            raise wire.WireError("its first words are no welcome")
        self.refused = differences(self._layout, welcome.layout)
        if len(welcome.data) != welcome.layout.workers:
            self.refused.append(f"data: addresses of {len(welcome.data)} workers of {welcome.layout.workers}")
        if self.refused:
            log.error("prefill replica %s computes KV that cannot be used here; %s", self.name, "; ".join(self.refused))
            return
        if welcome.layout.numerics != self._layout.numerics:
            log.warning(
                "prefill replica %s may round differently: %s there, %s here", self.name, welcome.layout.numerics, self._layout.numerics
            )
        self.welcome = welcome
        self._heard(self, welcome)
        while not self._closing:
            self._heard(self, channel.receive())

    def _connect(self) -> wire.Channel[Any]:
        problems, limit = [], PREFIX_BYTES + limit_bytes(self._layout)
        for address in self.addresses:
            try:
                return wire.Channel(wire.connect(address, CONNECT_S), FromP, limit, sealed=True)
            except TimeoutError as problem:
                problems.append(str(problem))
        raise wire.Closed("; ".join(problems))
