"""One rank in a process of its own: `python -m tests.models.rank ADDRESS RANK RANKS OUT MODEL...`; what the gloo tests start."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rayneuron.collectives import gloo
from tests.models import runs


def main() -> None:
    address, rank, ranks, out, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    comm = gloo.join(address, int(rank), int(ranks), timeout_s=120.0)
    found = {}
    with torch.no_grad():
        for folder in folders:
            ids = torch.load(Path(folder) / "ids.pt", weights_only=True)
            found[folder] = runs.run(runs.Runner.open(Path(folder), comm), ids, 17)
    found["verbs"] = verbs(comm)
    torch.save(found, Path(out) / f"{rank}.pt")
    gloo.leave()


def verbs(comm: gloo.Gloo) -> dict[str, torch.Tensor]:
    """Every verb once, on values that tell the ranks apart."""
    me, n = comm.rank, comm.ranks
    x = torch.arange(n * 6, dtype=torch.float32).view(2, n * 3).add(100 * me)
    found = {"reduce": comm.reduce(x), "gather": comm.gather(x, 0), "scatter": comm.reduce_scatter(x, 1)}
    found["half"] = comm.reduce(torch.full((3,), 1.0 + me, dtype=torch.bfloat16))
    column = torch.zeros(4, 2)
    ring = torch.full((4,), float(me))
    if me % 2 == 0:
        comm.send(ring, (me + 1) % n)
        comm.receive(column[:, 0], (me - 1) % n)
    else:
        comm.receive(column[:, 0], (me - 1) % n)
        comm.send(ring, (me + 1) % n)
    found["ring"] = column
    word = torch.full((4, 2), float(me))
    comm.broadcast(word.T, n - 1)
    found["broadcast"] = word
    return found


if __name__ == "__main__":
    main()
