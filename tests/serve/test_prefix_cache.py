"""The prefix cache as clients and Prometheus see it: what usage and metrics say, salts, and resets where they are allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.serve.real import Server, serving

PROMPT = list(range(20, 20 + 150))


async def ask(server: Server, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | more
    status, reply = await server.post("/v1/completions", json.dumps(body).encode())
    assert status == 200, reply
    if more.get("stream"):
        return json.loads(reply.split(b"data: ")[-2])
    return json.loads(reply)


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def metric(server: Server, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(server.server.telemetry.text().decode())
    (found,) = [s.value for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()]
    return found


async def test_a_prompt_asked_again_is_found_and_said_so(tiny: Path) -> None:
    async with serving(tiny, max_model_len=512) as server:
        first, again = await ask(server), await ask(server)
        assert [cached(first), cached(again)] == [0, 144] and first["choices"] == again["choices"]
        streamed = await ask(server, stream=True, stream_options={"include_usage": True})
        assert cached(streamed) == 144
        chat = {"messages": [{"role": "user", "content": "word " * 80}], "max_tokens": 2}
        for known in (False, True):
            status, reply = await server.post("/v1/chat/completions", json.dumps(chat).encode())
            assert status == 200 and (cached(json.loads(reply)) > 0) is known
        assert cached(await ask(server, cache_salt="mine")) == 0 and cached(await ask(server, cache_salt="mine")) == 144
        await server.settle()
        asked, found = metric(server, "vllm:prefix_cache_queries_total"), metric(server, "vllm:prefix_cache_hits_total")
        assert found == metric(server, "vllm:prompt_tokens_cached_total") and 3 * 144 < found < asked
        states = {state: metric(server, "rayneuron:kv_blocks", state=state) for state in ("free", "cached", "held", "limbo")}
        assert states["held"] == states["limbo"] == 0 and states["cached"] >= 4 and metric(server, "vllm:kv_cache_usage_perc") == 0
        assert sum(states.values()) == metric(server, "rayneuron:kv_tokens_total") / 64
        assert metric(server, "vllm:cache_config_info", block_size="64", enable_prefix_caching="True") == 1
        assert metric(server, "rayneuron:kv_ledger_wrong_total") == 0


async def test_a_reset_is_for_who_may(tiny: Path) -> None:
    async with serving(tiny, max_model_len=512, serving={"reset_prefix_cache": True}) as server:
        await ask(server)
        assert await server.post("/reset_prefix_cache", b"") == (200, b'{"blocks":3}')  # the last one in part
        assert cached(await ask(server)) == 0 and cached(await ask(server)) == 144
    async with serving(tiny, max_model_len=512, enable_prefix_caching=False) as server:
        status, reply = await server.post("/reset_prefix_cache", b"")
        assert status == 400 and b"serving.reset_prefix_cache: true" in reply
        assert [cached(await ask(server)) for _ in range(2)] == [0, 0]
        assert metric(server, "vllm:prefix_cache_queries_total") == 0


async def test_books_that_do_not_balance_are_counted(tiny: Path) -> None:
    """Broken by hand: the engine finds it when it has nothing else to do, says so in the log, and goes on."""
    from rayneuron.engine import loop

    async with serving(tiny, max_model_len=512) as server:
        served = server.server.served
        blocks = served.opened.engine.scheduler.blocks
        served.engine._audited = -loop.AUDIT_STEPS
        (lost,) = blocks._free.take(1)
        await ask(server)
        for _ in range(2):  # between the two it had nothing to do
            served.engine.ask(lambda engine: None).result(60)
        assert metric(server, "rayneuron:kv_ledger_wrong_total") == 1
        blocks._free.give(lost)


async def test_gateways_hear_of_what_is_kept_where_the_file_does_not_forbid_it(tiny: Path) -> None:
    for told in (True, False):
        async with serving(tiny, max_model_len=512, kv_events=told) as server:
            await ask(server)
            await server.settle()
            news = server.server.news(0, 0)
            assert (news is not None) is told
            if news is not None and (heard := await news) is not None:
                assert heard.held == server.server.served.opened.engine.scheduler.blocks.hashes() and len(heard.held) == 2
                assert server.server.news(heard.epoch, heard.number) is None
