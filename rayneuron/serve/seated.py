"""A replica on a seat of a gateway's host ends with the gateway: cores of a model that nobody can ask any more are given back."""

from __future__ import annotations

import asyncio
import logging
import time

from ray import serve

from rayneuron.group_config import SeatSection

log = logging.getLogger(__name__)

LOOKS = 10  # in the time that a gateway may be gone


async def end_with_owner(seat: SeatSection) -> None:
    """Delete the own application once its owner has been gone for long. One that is only not ready counts as there."""
    seen_s = time.monotonic()
    while True:
        await asyncio.sleep(seat.orphan_s / LOOKS)
        try:
            there = await asyncio.to_thread(serve.status)
        except Exception as wrong:  # the controller is on its way back
            log.warning("Serve could not be asked for %s: %r", seat.owner, wrong)
            seen_s = time.monotonic()
            continue
        if seat.owner in there.applications:
            seen_s = time.monotonic()
        elif time.monotonic() - seen_s > seat.orphan_s:
            name = serve.get_replica_context().app_name
            log.warning("%s ends: its gateway, %s, has been gone for %.0f s", name, seat.owner, seat.orphan_s)
            await asyncio.to_thread(serve.delete, name, False)
            return
