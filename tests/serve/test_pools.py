"""A prefill and a decode replica, with everything real but Ray: the texts of one replica alone, whatever becomes of the other."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rayneuron import config, loading
from rayneuron.api.adapters import Change
from rayneuron.group_config import prefill_of
from rayneuron.serve import pools
from rayneuron.serve.pools import Prefiller
from rayneuron.serve.replica import Replica
from tests.models import adapters as adapted
from tests.serve.real import HEALTHY, Server, serving
from tests.serve.scripted import PATIENCE_S

TOKEN = b"t" * 32
LONG = " ".join(f"word {i} of a long prompt" for i in range(12))  # some blocks of it


class Decoder(Replica):
    """A Replica that follows prefill replicas as `found` says they are."""

    found: dict[str, tuple[str, ...]]

    def equip(self, opened: loading.Opened) -> None:
        self.pulls = pools.borrow(self.config, opened, TOKEN)


@contextlib.asynccontextmanager
async def pooled(path: Path, replicas: int = 1, **more: Any) -> AsyncIterator[tuple[Server, list[Prefiller]]]:
    """One decode replica and some that prefill, of the model of `path`."""
    words = {"model": {"path": str(path), "name": "tiny"}, "dtype": "fp32", "threads": 1, "limits": {"max_waiting": 4000}}
    said = {"local_tokens": 0, "stall_s": 1.0, **more.pop("pools", {})}
    made = config.parse({**words, "block_size": 16, **more, "pools": said})
    there = [Prefiller(prefill_of(made)) for _ in range(replicas)]
    decoder = Decoder(made)
    for one in there:
        await one.open(TOKEN, None)
    await decoder.open()
    decoder.found = {str(i): one.addresses for i, one in enumerate(there)}

    async def look() -> dict[str, tuple[str, ...]]:
        return decoder.found

    following = asyncio.create_task(pools.follow(decoder.pulls, look))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(decoder.pulls.ready) < replicas:
                await asyncio.sleep(0.01)
        yield Server(decoder), there
    finally:
        following.cancel()
        await decoder.close()
        for one in there:
            await one.close()


async def settled(there: list[Prefiller]) -> None:
    """Every ticket of a prefill replica has ended, and its blocks are given back."""
    async with asyncio.timeout(PATIENCE_S):
        for one in there:
            while one.load().calls or one.load().snapshot.kv_tokens_used or one.load().snapshot.blocks_pinned:
                await asyncio.sleep(0.01)


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": LONG, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


@pytest.mark.parametrize("transport", ["shared", "sockets", *(["nixl"] if find_spec("nixl") is not None else [])])
def test_the_texts_are_those_of_one_replica(tiny: Path, transport: str) -> None:
    bodies = [body(), body(n=3, temperature=1.0, seed=5, logprobs=2), body(echo=True, logprobs=1, max_tokens=4), body(max_tokens=1)]
    bodies += [body(prompt=LONG[i:], repetition_penalty=1.2) for i in (1, 40, 90)] + [body(stop=["e"], min_tokens=2)]

    async def ask() -> None:
        async with serving(tiny) as alone:
            wanted = [await alone.server.completions(one) for one in bodies]
            streams = [await alone.stream(number) for number in range(HEALTHY)]
        async with pooled(tiny, pools={"transport": transport}) as (server, there):
            got = await asyncio.gather(*(server.server.completions(one) for one in bodies))
            assert [choices(one) for one in got] == [choices(one) for one in wanted]
            assert [one["usage"]["completion_tokens"] for one in got] == [one["usage"]["completion_tokens"] for one in wanted]
            assert await asyncio.gather(*(server.stream(number) for number in range(HEALTHY))) == streams
            await server.settle()
            await settled(there)
            text = server.server.telemetry.text().decode()
            asked = len(bodies) + HEALTHY
            assert f'rayneuron:prefills_total{{engine="0",model_name="tiny",where="remote",why="long"}} {asked}.0' in text
            counts = server.server.pulls.counts
            assert counts["adopted"] >= asked - 1, "max_tokens 1 needs no KV"
            assert counts["adopted"] + counts["cancelled"] == asked and not counts["fallbacks"], dict(counts)
            assert server.server.pulls.counts["bytes"] > 0
            hits, queries = (float(re.search(rf"\nvllm:external_prefix_cache_{n}_total{{.* (.+)\n", text)[1]) for n in ("hits", "queries"))
            assert 0 < hits <= queries and hits == counts["hits"]
            again = await server.server.completions(body())
            assert choices(again) == choices(wanted[0]) and again["usage"]["prompt_tokens_details"]["cached_tokens"] > 16

    asyncio.run(ask())


def choices(reply: Any) -> list[Any]:
    return [(one["text"], one["finish_reason"], one["logprobs"]) for one in reply["choices"]]


def test_each_adapter_has_kv_of_its_own_in_both_pools(tiny: Path, tmp_path: Path) -> None:
    """The same prompts with three adapters and none, at once, choices too: the texts of one replica. What the prefill pool has not loaded
    it declines, and is computed where it was asked for; what it has loaded meanwhile is not."""
    for i, name in enumerate("abc"):
        adapted.write(tmp_path / name, tiny, r=4, seed=i, size=0.2)
    lora = {"lora_modules": {name: str(tmp_path / name) for name in "ab"}, "max_loras": 2, "directory": str(tmp_path)}
    words = {"dtype": "fp32", "lora": {**lora, "allow_runtime_updating": True}}
    kinds = [{}, {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 2, "prompt": LONG[40:]}]
    bodies = [body(model=model, **kind) for kind in kinds for model in ("tiny", "a", "b", "c")]

    async def ask() -> None:
        async with serving(tiny, **words) as alone:
            await alone.server.change_adapters(Change("c", "c"))
            drawn = body(model="a", n=3, temperature=1.0, seed=5, return_token_ids=True)
            first = [one["token_ids"][0] for one in (await alone.server.completions(drawn))["choices"]]
            assert len(set(first)) > 1
            bodies.extend([body(model="b", max_tokens=1), {**drawn, "stop_token_ids": first[:1]}])  # all ends, or who led, with token 0
            wanted = [choices(await alone.server.completions(one)) for one in bodies]
        assert len({str(one) for one in wanted[:4]}) == 4
        async with pooled(tiny, **words) as (server, there):
            await server.server.change_adapters(Change("c", "c"))
            got = await asyncio.gather(*(server.server.completions(one) for one in bodies))
            assert [choices(one) for one in got] == wanted
            counts, declined = server.server.pulls.counts, there[0]._ready()[1].counts
            assert declined["declined"] == counts["fallbacks"] == len(kinds), "those of the adapter that is not there"
            await there[0].change_adapters(Change("c", "c"))
            await server.server.forget_prefixes()
            got = await asyncio.gather(*(server.server.completions(one) for one in bodies))
            assert [choices(one) for one in got] == wanted and counts["fallbacks"] == len(kinds)
            assert counts["adopted"] > len(bodies) and declined["declined"] == len(kinds)
            left = asyncio.ensure_future(server.server.completions(body(model="a", max_tokens=60, prompt=LONG[9:])))
            gone = asyncio.ensure_future(server.server.completions(body(model="c", max_tokens=60, prompt=LONG[5:])))
            async with asyncio.timeout(PATIENCE_S):
                while (load := server.server.load().snapshot).remote + load.running < 2:
                    await asyncio.sleep(0)
            left.cancel()
            for one in (server.server, there[0]):  # whoever has begun ends with what it began with
                await one.change_adapters(Change("c"))
            assert (await gone)["usage"]["completion_tokens"] == 60
            await settled(there)
            for loop in (server.server.served.engine, there[0]._ready()[0]):
                await asyncio.wrap_future(loop.ask(lambda engine: engine.check_ledger()))
                ledger = loop.engine.adapters
                assert {*ledger.names} == {*"ab"} and ledger.kept == {*ledger.names.values()}

    asyncio.run(ask())


def test_a_prefill_replica_that_goes_costs_time_alone(tiny: Path) -> None:
    """It closes in the middle of what it computes; then another comes."""

    async def ask() -> None:
        async with serving(tiny) as alone:
            wanted = [choices(await alone.server.completions(body(prompt=LONG[i:]))) for i in range(12)]
        async with pooled(tiny) as (server, there):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(server.server.completions(body(prompt=LONG[i:]))) for i in range(12)]
                while not there[0].load().calls:
                    await asyncio.sleep(0)
                await there.pop().close()
            assert [choices(task.result()) for task in tasks] == wanted
            assert server.server.pulls.counts["fallbacks"] > 0 and not server.server.pulls.ready
            stages = re.findall(r'rayneuron:fallbacks_total.*stage="(\w+)"} ([0-9.]+)\n', server.server.telemetry.text().decode())
            assert sum(float(n) for _, n in stages) == server.server.pulls.counts["fallbacks"]
            assert {stage for stage, _ in stages} == {"asked", "pulling", "streamed", "committing"}
            there.append(Prefiller(prefill_of(server.server.config)))
            await there[0].open(TOKEN, None)
            server.server.found = {"new": there[0].addresses}
            async with asyncio.timeout(PATIENCE_S):
                while not server.server.pulls.ready:
                    await asyncio.sleep(0.01)
            adopted = server.server.pulls.counts["adopted"]
            assert choices(await server.server.completions(body(prompt="And " + LONG))) and server.server.pulls.counts["adopted"] > adopted
            await server.settle()
            await settled(there)

    asyncio.run(ask())


def test_a_client_that_leaves_gives_everything_back(tiny: Path) -> None:
    async def ask() -> None:
        async with pooled(tiny, replicas=2) as (server, there):
            for _ in range(3):
                tasks = [asyncio.create_task(server.server.completions(body(prompt=LONG[i:], max_tokens=200))) for i in range(10)]
                while not server.server.load().snapshot.remote:
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await server.settle()
                await settled(there)

    asyncio.run(ask())


def test_pools_that_differ_do_not_meet(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What no file can say (they are checked): another model behind the same name. The decode replica computes, and says why."""

    async def ask() -> None:
        async with pooled(tiny, replicas=0) as (server, there):
            other = Prefiller({**prefill_of(server.server.config).model_dump(exclude_unset=True), "block_size": 32})
            there.append(other)
            await other.open(TOKEN, None)
            server.server.found = {"other": other.addresses}
            async with asyncio.timeout(PATIENCE_S):
                while "block: 16 here, 32 there" not in caplog.text:
                    await asyncio.sleep(0.01)
            assert not server.server.pulls.ready
            reply = await server.server.completions(body())
            assert reply["usage"]["completion_tokens"] == 12 and server.server.pulls.counts["adopted"] == 0

    asyncio.run(ask())


def test_one_trace_holds_both_pools(tiny: Path) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from rayneuron.serve.trace import Tracer

    seen = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen))

    async def ask() -> None:
        async with pooled(tiny) as (server, there):
            from dataclasses import replace

            here = server.server
            here._served = here.now = replace(here.served, tracer=Tracer("tiny", provider))
            there[0]._tracer = Tracer("tiny", provider)
            await here.completions(body())
            await server.settle()
            await settled(there)

    asyncio.run(ask())
    by_name = {span.name: span for span in seen.get_finished_spans()}
    whole, part = by_name["generate"], by_name["prefill"]
    assert part.parent.span_id == whole.context.span_id and part.context.trace_id == whole.context.trace_id
    assert whole.kind == trace.SpanKind.SERVER and whole.start_time <= part.start_time and part.end_time <= whole.end_time
    points = [event.name for event in whole.events]
    assert points == ["arrived", "scheduled", "prefill_done", "handed_over", "adopted", "first_token", "finished"]
