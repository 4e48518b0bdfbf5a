"""A prefill replica in a process of its own: `python -m tests.devices.neuron.prefill_process CONFIG TOKEN`; tells its addresses, then on
every line of its input what it holds."""

from __future__ import annotations

import asyncio
import json
import sys

from rayneuron.config import parse
from rayneuron.group_config import prefill_of
from rayneuron.serve.pools import Prefiller


def staged() -> int:
    """Bytes of host memory that copies of blocks take."""
    found, size = False, 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                found = "memfd:rayneuron-staged" in line
            elif found and line.startswith("Rss:"):
                size += int(line.split()[1]) * 1024
    return size


async def main() -> None:
    made = Prefiller(prefill_of(parse(json.loads(sys.argv[1]))))
    await made.open(sys.argv[2].encode(), "127.0.0.1")
    print(json.dumps(made.addresses), flush=True)
    most = 0
    while await asyncio.to_thread(sys.stdin.readline):
        most = max(most, staged())
        load = made.load()
        print(
            json.dumps({"pinned": load.snapshot.blocks_pinned, "calls": load.calls, "staged": staged(), "counts": made.stats()["tickets"]})
        )
        sys.stdout.flush()
    await made.close()


if __name__ == "__main__":
    asyncio.run(main())
