"""What a replica is for gateways: it shows its card, and tells who is connected that it leaves."""

# No `from __future__ import annotations` here: Serve looks at the signature of what it multiplexes.
import asyncio
import logging
import time

import ray
from ray import serve

from rayneuron import loading
from rayneuron.serve.hub import Hub
from rayneuron.serve.replica import Replica

log = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.05
HANDED_OVER = 0.9  # of the time Serve gives a replica that it takes away: what has not ended by then goes on elsewhere


class Answering(Replica):
    """A replica that is open to gateways once it listens and shows its card; what Serve makes for the former takes a while."""

    _hub: Hub | None = None
    _until_s = 0.0  # when orders are handed over

    async def listen(self) -> None:
        """Be there for gateways."""
        self._hub = Hub(self, serve.get_replica_context().replica_id.unique_id)
        await self._hub.listen(ray.util.get_node_ip_address())
        await self.address(self._hub.replica)

    @serve.multiplexed(max_num_models_per_replica=1)
    async def address(self, replica: str) -> str:
        """Nothing is loaded: Serve's routers send a call that names this model, the replica's id, to the one replica that has it."""
        return replica

    async def attend(self, gateway: bytes, replica: str) -> bool:
        """Wait, to be counted by Serve, while there is an order of this gateway; False where this is not that replica."""
        assert self._hub is not None
        return await self._hub.attend(gateway, replica)

    async def card(self) -> bytes:
        """What a gateway has to know of this replica (frames.Card). Raises NotReady where it takes no calls."""
        if self._hub is None or self.state != "serving":
            raise self._shut.refusal
        opened = self.served.opened
        assert isinstance(opened, loading.Opened)
        return self._hub.card(self.config, opened, self._user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """As Replica's; what waits at gateways until some replica has little to do is work too."""
        stats = super().record_autoscaling_stats()
        if self._hub is not None:
            stats["backlog_ms"] += self._hub.waiting_ms
        return stats

    async def drain(self, within_s: float | None = None) -> None:
        """As Replica's; gateways are told."""
        self.hand_over(within_s or 0.0)
        await super().drain(within_s)

    def hand_over(self, within_s: float, failed: bool = False) -> None:
        """Have gateways send what does not end in time elsewhere; where it has `failed`, everything."""
        if self._hub is not None:
            self._hub.leave(within_s, failed)

    async def leave_with_serve(self) -> None:
        """Tell gateways once Serve takes this replica away: it waits for calls, tells those who choose by it alone, and orders are neither.
        Whoever calls it past gateways is answered until Serve has done."""
        (actor,) = ray._private.worker.global_worker.actors.values()
        own = actor._replica_impl
        while not own._shutting_down:
            await asyncio.sleep(LOOK_PERIOD_S)
        within_s = HANDED_OVER * self.config.serving.drain_timeout_s
        self._until_s = time.monotonic() + within_s
        log.info("Serve takes this replica away: gateways send it nothing more, and what has not ended in %.1f s elsewhere", within_s)
        for handler in logging.getLogger("rayneuron").handlers:
            handler.flush()  # in the fast profile Serve keeps lines back, which a process that ends takes with it
        self.hand_over(within_s)

    async def hang_up(self) -> None:
        """Close every gateway's connection once its orders have ended, or are to be handed over; what is left goes on elsewhere."""
        if self._hub is not None:
            await self._hub.ended(self._until_s - time.monotonic())
            self._hub.leave(0.0)
            await self._hub.close()
