"""A prefill replica in a process of its own, without Serve, or only memory to read: prints its addresses, serves until its input ends."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any


def memory(said: dict[str, Any]) -> tuple[str, ...]:
    """`layers` of `blocks` of `heads` units of `unit` bytes, all on one ticket."""
    from rayneuron.devices.base import KvMemory
    from rayneuron.devices.cpu import carry, packing
    from rayneuron.devices.cpu.library import library
    from rayneuron.transfer.lending import Lender

    layers, blocks, heads, unit = said["shape"]
    whole, fd = packing.shared(layers * blocks * heads * unit)
    units = whole.view(layers, blocks, heads, unit)
    units.copy_(units.new_empty(units.shape[1:]).random_(0, 256))
    held = KvMemory([layer.numpy() for layer in units], "rows", fd, blocks * heads * unit, carry.by(library()))
    lender = Lender(held, bytes.fromhex(said["token"]), 1, "127.0.0.1")
    lender.lend(bytes(16), bytes(16), range(blocks))
    return lender.addresses  # its threads keep it


async def serve(said: dict[str, Any]) -> None:
    """A whole replica."""
    from rayneuron.config import parse
    from rayneuron.group_config import prefill_of
    from rayneuron.serve.pools import Prefiller

    prefiller = Prefiller(prefill_of(parse(said["config"])))
    await prefiller.open(bytes.fromhex(said["token"]), "127.0.0.1")
    print(json.dumps(prefiller.addresses), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    said = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, said["cores"])
    sys.setswitchinterval(0.0002)  # as every replica has it
    if "shape" in said:
        kept = memory(said)
        print(json.dumps(kept), flush=True)
        sys.stdin.read()
        os._exit(0)
    asyncio.run(serve(said))
