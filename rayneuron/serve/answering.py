"""What a replica is for gateways: it shows its card, and tells who is connected that it leaves."""

# No `from __future__ import annotations` here: Serve looks at the signature of what it multiplexes.
import ray
from ray import serve

from rayneuron import loading
from rayneuron.serve.hub import Hub
from rayneuron.serve.replica import Replica


class Answering(Replica):
    """A replica that is open to gateways once it listens and shows its card; what Serve makes for the former takes a while."""

    _hub: Hub | None = None

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

    async def hang_up(self) -> None:
        """Close every gateway's connection; what came over it a moment ago goes on elsewhere."""
        if self._hub is not None:
            self._hub.leave(0.0)
            await self._hub.close()
