"""Sessions that share a beginning, over several replicas: what their first tokens take, by who chooses the replica."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import client
import report
from prompts import Words, body
from server import Server

MODEL_NAME = "bench"
OWN = f"/m/{MODEL_NAME}"  # the model's own route, where Serve chooses
REPLICA = "serve_multiplexed_model_id"  # whom Serve's proxy gives a call to that has this header, by the replica's id
GATEWAY, TURNS, SERVE = "the gateway", "round robin", "Serve's own choice"
SHARED, NEW, ANSWER, SESSIONS, ROUNDS = 1000, 60, 16, 8, 6  # tokens of the beginning, of a turn and its answer; sessions, turns of each


@dataclass(frozen=True)
class Played:
    """One play of all sessions: seconds to the first token of first and of later turns, and the share of prompt tokens found."""

    first: list[float]
    later: list[float]
    found: float

    @property
    def mean_s(self) -> float:
        return statistics.fmean([*self.first, *self.later])


async def replicas(server: Server, words: Words, count: int) -> list[str]:
    """The ids of a model's replicas, as the gateway names them where it says where a reply came from."""

    async def named(number: int) -> str:
        asked = client.Connection(server.url, {"x-rayneuron-explain": "1"})
        reply = await client.complete(asked, "/v1/completions", body(MODEL_NAME, words.prompt(NEW, f"who-{number}")[0], ANSWER))
        asked.close()
        assert not reply.error, reply.error
        return asked.told["x-rayneuron-route"].partition("replica=")[2].partition(";")[0]

    found: set[str] = set()
    for turn in range(10):  # of many at once, so that each has some
        found.update(await asyncio.gather(*(named(4 * count * turn + i) for i in range(4 * count))))
        if len(found) == count:
            return sorted(found)
    raise RuntimeError(f"of {count} replicas the gateway has chosen {len(found)} alone")


async def play(server: Server, words: Words, way: str, number: int, ids: Sequence[str]) -> Played:
    """All sessions once, from empty caches, with texts of their own. `ids`: the replicas, which take turns where that is the way."""
    connection = client.Connection(server.url)
    status, pieces = await connection.request("POST", f"{OWN}/reset_prefix_cache")
    assert status == 200, b"".join([piece async for piece in pieces])
    connection.close()
    shared, turns = words.prompt(SHARED, "shared")[0], itertools.cycle(ids) if way == TURNS else None
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    before, served = [await server.metric(metric) for metric in names], [await _answers(server, each) for each in ids]
    talks = [[words.prompt(NEW, f"{number}-{way}-{s}-{t}")[0] for t in range(ROUNDS)] for s in range(SESSIONS)]
    firsts = await asyncio.gather(*(_session(server, shared, talk, i, way, turns) for i, talk in enumerate(talks)))
    asked, hits = [await server.metric(metric) - some for metric, some in zip(names, before, strict=True)]
    if turns is not None:
        took = [await _answers(server, each) - some for each, some in zip(ids, served, strict=True)]
        assert len(set(took)) == 1, f"replicas that take turns answered {took} calls"
    return Played([first[0] for first in firsts], [first_s for first in firsts for first_s in first[1:]], hits / asked)


async def _session(server: Server, shared: str, talk: Sequence[str], number: int, way: str, turns: Iterator[str] | None) -> list[float]:
    said, first, draw = shared, [], random.Random(number)
    for more in talk:
        said += more
        asked = client.Connection(server.url + ("" if way == GATEWAY else OWN), {REPLICA: next(turns)} if turns is not None else {})
        reply = await client.complete(asked, "/v1/completions", body(MODEL_NAME, said, ANSWER))
        asked.close()
        assert not reply.error, reply.error
        first.append(reply.ttft_s)
        await asyncio.sleep(0.3 + 0.4 * draw.random())
    return first


async def _answers(server: Server, replica: str) -> float:
    """What one replica has answered, by its own word."""
    _, said = await client.fetch(server.url, f"{OWN}/metrics", headers={REPLICA: replica})
    return sum(map(float, re.findall(r"^vllm:request_success_total(?:{[^}]*})? (\S+)", said.decode(), re.MULTILINE)))


async def prefix(server: Server, words: Words, rounds: int, count: int) -> list[tuple[str, float, str, str]]:
    """Bar 5."""
    ids, played = await replicas(server, words, count), dict[str, list[Played]]()
    for turn in range(rounds):
        for name in (TURNS, GATEWAY, SERVE):
            played.setdefault(name, []).append(await play(server, words, name, turn, ids))
    rows = []
    for name, each in played.items():
        cold, warm = (statistics.median(map(statistics.fmean, some)) for some in ([p.first for p in each], [p.later for p in each]))
        rows.append((name, statistics.median(p.mean_s for p in each), cold, warm, statistics.median(p.found for p in each)))
    print(report.table(["chosen by", "TTFT mean, s", "of first turns", "of later turns", "share of prompt tokens found"], rows))
    prompts = [SHARED + NEW * (turn + 1) for turn in range(ROUNDS)]
    best = 1 - (SHARED + SESSIONS * NEW * ROUNDS) / (SESSIONS * sum(prompts))  # of a cache that forgets nothing, shared by all
    by = {name: [p.mean_s for p in each] for name, each in played.items()}
    against = report.median_ratio(by[GATEWAY], by[SERVE])
    print(f"\nTTFT mean of sessions by the gateway, times {SERVE}: {against:.2f}")
    return [
        report.bar("TTFT mean of sessions, times round robin", report.median_ratio(by[GATEWAY], by[TURNS]), 0.6, False),
        report.bar("prompt tokens found, share of one infinite cache", statistics.median(p.found for p in played[GATEWAY]) / best, 0.9),
    ]
