"""Pools whose replicas are groups of processes, cut in different ways: each worker reads and lends its own part."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.serve.real import serving
from tests.serve.test_pools import body, choices, pooled, settled

SLOW = pytest.mark.slow
TP, PP = "tensor_parallel", "pipeline_parallel"
CUTS = [
    ({TP: 2}, {}),
    pytest.param({}, {TP: 2}, marks=SLOW),
    pytest.param({TP: 2}, {TP: 2}, marks=SLOW),
    pytest.param({PP: 2}, {}, marks=SLOW),
    pytest.param({TP: 2}, {PP: 2}, marks=SLOW),
]


@pytest.mark.parametrize(("there", "here"), CUTS, ids=str)
def test_the_texts_are_those_of_one_process(tiny: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    bodies = [body(), body(n=3, temperature=1.0, seed=5), *(body(prompt="word " * n, max_tokens=6) for n in (15, 16, 17, 31, 32, 33))]

    async def ask() -> None:
        async with serving(tiny) as alone:
            wanted = [choices(await alone.server.completions(one)) for one in bodies]
        back = {name: 1 for name in here if name not in there}  # what the prefill pool would take from the file
        async with pooled(tiny, **here, pools={"prefill": {**back, **there}}) as (server, found):
            got = await asyncio.gather(*(server.server.completions(one) for one in bodies))
            assert [choices(one) for one in got] == wanted
            counts = server.server.pulls.counts
            assert counts["adopted"] == len(bodies) and not counts["fallbacks"] and counts["bytes"] > 0, counts
            await settled(found)

    asyncio.run(ask())
