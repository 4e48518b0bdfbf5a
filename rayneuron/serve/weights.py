"""Other weights of the same model while the server runs: who may bring them, and how a replica takes them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol, runtime_checkable

from rayneuron.config import Deployment
from rayneuron.engine.engine import Engine
from rayneuron.engine.loop import EngineLoop
from rayneuron.engine.probe import probe
from rayneuron.engine.swap import Swaps, exchange
from rayneuron.errors import CheckpointError, RequestError


@runtime_checkable
class Reweighed(Protocol):
    """A server whose weights may change."""

    async def load_weights(self, path: str) -> str:
        """Those of a directory, on every replica; what they are known by. Raises RequestError, NotReady."""


async def change(config: Deployment, loop: EngineLoop, path: str, identity: str | None = None) -> str:
    """Take other weights in one replica. Requests under way end with those they began with; who comes later waits, and has the new ones.
    `identity`: what they are known by elsewhere, and must be here.

    Both lie in memory while they are exchanged. The prefix cache is emptied. Where anything is wrong it goes on as before.
    """
    swap = loop.engine.runner.swap
    for there, why in (
        (swap is None, "this device's graphs hold the weights they were loaded with; start a replica on the other ones"),
        (config.lora is not None, "its adapters (lora) were made for the weights it has; start a replica on the other ones"),
        (config.pools is not None, "its pools hand KV of the weights they have to each other; start an application on the other ones"),
    ):
        if there:
            raise RequestError(f"the weights of this server cannot be changed: {why}", param="path")
    assert swap is not None
    try:
        found = await asyncio.to_thread(swap.check, path)
        await asyncio.wrap_future(loop.drained(partial(_exchange, swap=swap, path=path, identity=identity or found)))
    except CheckpointError as wrong:
        raise RequestError(wrong.message, param="path") from None
    return found


def _exchange(engine: Engine, swap: Swaps, path: str, identity: str) -> None:
    """On the engine's thread, where nobody runs."""
    engine.scheduler.blocks.reset()
    exchange(swap, path, identity, partial(probe, engine.runner, engine.vocab))
