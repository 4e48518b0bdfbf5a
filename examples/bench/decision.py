"""What a gateway's choice of a replica costs: the whole decision, before many replicas that each say what they keep.

    python examples/bench/decision.py --workers 1000 --blocks 512

No device and no process but this one. Prompts of three kinds take turns: all of it somewhere, half of it, none. A loop of plain Python
beside it, timed in the same run, says how fast the machine was meanwhile.
"""

from __future__ import annotations

import argparse
import json
import time
from random import Random

from rayneuron.engine.buckets import capacity
from rayneuron.news import KvNews, Pressure, Stored
from rayneuron.policies.choice import Chooser, GatewayAsk
from rayneuron.policies.cost import Costs
from rayneuron.policies.known_worker import KnownWorker
from rayneuron.types import Profile

BLOCK = 64
KINDS = {"hit": 1.0, "half": 0.5, "cold": 0.0}


def fleet(workers: int, blocks: int, prefixes: int, random: Random) -> tuple[Chooser, list[list[bytes]]]:
    """Replicas that are busy by chance, each with a system prompt that some share, and blocks of its own."""
    c = capacity(rows=16, length=8192, chunk=512, block=BLOCK)
    decode = tuple((b, n, 5 + 0.5 * b + b * n / 1024) for b in c.batch for n in c.lengths)
    prefill = tuple((1, t, n, 4 + 0.1 * t + 2 * n / 1024) for t in c.context for n in c.lengths)
    shapes = {"batch": c.batch, "lengths": c.lengths, "context": c.context, "prefix": c.prefix, "chunk": c.chunk}
    costs = Costs(Profile(**shapes, decode=decode, prefill=prefill, tokens=((1, 5.0),)))
    chooser = Chooser(Random(random.random()))
    shared = [[random.randbytes(16) for _ in range(16)] for _ in range(prefixes)]
    chains = []
    for number in range(workers):
        rows = random.randint(0, 15)
        load = Pressure(0, random.expovariate(1 / 60), rows, random.randint(1, 8000) if rows else 0, 16 - rows, 40.0, 100_000)
        worker = KnownWorker(number, f"r{number}", costs, 131_072, load, 0.0)
        chooser.workers.join(worker)
        chooser.workers.weigh(worker, 0.0)
        kept, events = 0, []
        for head in random.sample(shared, min(4, prefixes)):
            chain = [*head, *(random.randbytes(16) for _ in range(blocks // 4 - 16))]
            kept += len(chain)
            chains.append(chain)
            events.append(Stored(b"", chain))
        chooser.hear(number, KvNews(1, 1, [list(events)]))
    return chooser, chains


def asks(chains: list[list[bytes]], count: int, random: Random) -> list[tuple[str, GatewayAsk]]:
    """Prompts of up to 100 blocks."""
    found = []
    for key in range(count):
        kind = random.choice(sorted(KINDS))
        chain, length = random.choice(chains), random.randint(20, 100)
        known = int(length * KINDS[kind])
        hashes = (*chain[:known], *(random.randbytes(16) for _ in range(length - known)))
        found.append((kind, GatewayAsk(key, "", length * BLOCK + 30, 256, hashes=hashes, block=BLOCK)))
    return found


def yardstick() -> float:
    """Microseconds of a loop that is always the same."""
    began, total = time.perf_counter(), 0
    for i in range(200):
        total += i * i % 7
    return (time.perf_counter() - began) * 1e6


def at(values: list[float], share: float) -> float:
    """A percentile."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=512, help="a worker keeps (512)")
    parser.add_argument("--prefixes", type=int, default=50, help="beginnings that several share (50)")
    parser.add_argument("--decisions", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random = Random(args.seed)
    chooser, chains = fleet(args.workers, args.blocks, args.prefixes, random)
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    bare = []
    for kind, ask in asks(chains, args.decisions, random):
        began = time.perf_counter()
        terms = chooser.choose(ask, 128.0, 0.0)
        took[kind].append((time.perf_counter() - began) * 1e6)
        assert terms is not None
        bare.append(yardstick())
    every = [us for kind in took.values() for us in kind]
    told = {kind: {"p50_us": round(at(us, 0.5), 1), "p99_us": round(at(us, 0.99), 1)} for kind, us in {**took, "all": every}.items()}
    loop = {"loop_us": round(at(bare, 0.5), 1), "loop_least_us": round(at(bare, 0.001), 1)}
    print(json.dumps({"workers": args.workers, "blocks": args.blocks, "index": len(chooser.index), **told, **loop}))


if __name__ == "__main__":
    main()
