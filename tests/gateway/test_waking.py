"""Models that sleep behind a gateway, in one process: what callers see and what is measured while they wake, fail, and make room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayneuron.frames import Card, Standing
from rayneuron.gateway.routes import application
from rayneuron.gateway.waking import SeatReplicas
from tests.gateway.stage import Hosted, hosted
from tests.gateway.test_remote import client

GO = {"prompt": "say:hello", "max_tokens": 20}


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What starts took is remembered in a file."""
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path / "cache"))
    yield


def value(text: str, name: str, **labels: str) -> float:
    """The sum of the samples of a family with these labels."""
    found = [line for line in text.splitlines() if line.startswith(f"{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items())]
    assert found, (name, labels)
    return sum(float(line.split()[-1]) for line in found)


def asked(made: Hosted, http: Any, model: str, **more: Any) -> asyncio.Future[Any]:
    return asyncio.ensure_future(http.post("/v1/completions", json={**GO, "model": model, **more}))


async def test_what_a_host_measures(tiny: Path) -> None:
    async with hosted(tiny, {"a": 2, "b": 4}) as made, client(application(made.catalogues[0])) as http:

        async def measured() -> str:
            return str((await http.get("/metrics")).text)

        text = await measured()
        assert value(text, "rayneuron:host_models", model_name="a", state="sleeping") == 1
        assert value(text, "rayneuron:host_cores", state="free") == 4 and value(text, "rayneuron:host_seats") == 0
        assert value(text, "rayneuron:host_eta_seconds", model_name="a") >= 10, "a guess"
        made.stage.gate.clear()
        call = asked(made, http, "a")
        await made.until(lambda: made.rows() == {"a.0": "starting"})
        text = await measured()
        assert value(text, "rayneuron:host_models", model_name="a", state="loading") == value(text, "rayneuron:host_calls_held") == 1
        assert value(text, "rayneuron:host_cores", state="seat", node="n") == 2
        made.stage.gate.set()
        assert (await call).json()["choices"][0]["text"] == "hello"
        await made.until(lambda: made.rows() == {"a.0": "ready"})
        text = await measured()
        assert value(text, "rayneuron:host_models", model_name="a", state="ready") == 1
        assert value(text, "rayneuron:host_wakes_total", model_name="a", outcome="started") == 1
        assert value(text, "rayneuron:host_eta_error", model_name="a") > 0
        assert "rayneuron:host_eta_seconds{" not in "\n".join(line for line in text.splitlines() if 'model_name="a"' in line)
        await made.until(lambda: not any(wish.waiting for wish in made.arbiter.table.wishes(0.0)))
        assert value(await measured(), "rayneuron:host_calls_held") == 0
        made.stage.broken["b"] = "rayneuron.errors.ConfigError: no such weights"
        refused = await asked(made, http, "b")
        assert refused.status_code == 503 and "no such weights" in refused.text and int(refused.headers["retry-after"]) >= 1
        text = await measured()
        assert value(text, "rayneuron:host_refusals_total", model_name="b", reason="failed") == 1
        assert value(text, "rayneuron:host_wakes_total", model_name="b", outcome="failed") == 1
        assert value(text, "rayneuron:host_dismissals_total", model_name="a", why="room") == 1, "it went for b"
        made.stage.keeps = {3}
        await made.until(lambda: made.rows() == {} and made.arbiter._nodes["n"]["free"] == [0, 1, 2])
        assert value(await measured(), "rayneuron:host_cores", state="foreign") == 1
        heads = [line for line in text.splitlines() if line.startswith("# HELP")]
        assert len(heads) == len(set(heads)), "every family once"


async def test_an_arbiter_that_is_replaced_in_the_middle_of_a_wake(tiny: Path) -> None:
    """The one after it goes on with the start that is under way: one start, one seat, and the held call is answered."""
    async with hosted(tiny, {"a": 2}) as made, client(application(made.catalogues[0])) as http:
        made.stage.gate.clear()
        call = asked(made, http, "a")
        await made.until(lambda: made.stage.states)
        made.arbiter.close()
        made.arbiter = made.arise()
        await made.arbiter.open()
        assert made.rows() == {"a.0": "starting"}
        made.stage.gate.set()
        assert (await call).json()["choices"][0]["text"] == "hello"
        await made.until(lambda: made.rows() == {"a.0": "ready"})
        assert made.stage.given == [("a.0", (0, 1))]
        assert not made.arbiter.table.models["a"].parts, "what it has not seen begin it does not learn from"


async def test_an_arbiter_that_is_replaced_while_a_seat_goes(tiny: Path) -> None:
    """Serve still runs a seat whose engine has been told to end: it is no seat to adopt."""
    async with hosted(tiny, {"a": 2}) as made, client(application(made.catalogues[0])) as http:
        assert (await asked(made, http, "a")).status_code == 200
        await made.until(lambda: made.rows() == {"a.0": "ready"})
        made.arbiter.close()
        await asyncio.to_thread(made.stage.drain, "a.0", 1.0)
        made.arbiter = made.arise()
        await made.arbiter.open()
        call = asked(made, http, "a")
        await made.until(lambda: "a.1" in made.rows() or made.rows() == {"a.0": "starting"})
        assert (await call).json()["choices"][0]["text"] == "hello"
        await made.until(lambda: list(made.rows().values()) == ["ready"])
        assert len(made.stage.given) == 2


async def test_a_seat_of_an_arbiter_that_has_been_replaced_is_found_later_too(tiny: Path) -> None:
    """What the old one began in its last moment; what is of another gateway, or nobody's, is left alone, and its name is not taken."""
    async with hosted(tiny, {"a": 2, "gone": 1}) as made, client(application(made.catalogues[0])) as http:
        for key, owner in (("a.0", "other"), ("gone.7", "gateway")):
            row = made.arbiter.table.rows.setdefault(key, _row(key, made))
            await asyncio.to_thread(made.stage.start, row, made.arbiter._configs[row.model])
            made.stage.told[key] = {**made.stage.told[key], "owner": owner, "words": "others"}
            made.arbiter.table.rows.pop(key, None)  # it may have found already that Serve has none
        await made.until(lambda: "gone.7" not in made.stage.states)
        assert (await asked(made, http, "a")).json()["choices"][0]["text"] == "hello"
        assert "a.0" in made.stage.states and list(made.rows()) == ["a.1"]


def _row(key: str, made: Hosted) -> Any:
    from rayneuron.host.table import SeatRow

    first, size = (0, 2) if key.startswith("a") else (2, 1)
    return SeatRow(key, key.partition(".")[0], "n", first, size, "ready", 0.0, 0.0)


@pytest.mark.parametrize("what", ["start", "drain", "delete"])
async def test_what_serve_does_not_do_is_tried_again(what: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayneuron.host.table.ENDED_S", 0.3)
    monkeypatch.setattr("rayneuron.host.table.BACKOFF_S", 1.0)
    async with hosted(tiny, {"a": 4, "b": 4}) as made, client(application(made.catalogues[0])) as http:
        made.stage.refuse = {what: 1}
        first = await asked(made, http, "a")
        if what == "start":
            assert first.status_code == 503 and "TimeoutError" in first.text
            async with asyncio.timeout(60):  # whoever comes again is answered once the model may be tried again, and the gateway knows
                while first.status_code == 503:
                    await asyncio.sleep(0.1)
                    first = await asked(made, http, "a")
        assert first.json()["choices"][0]["text"] == "hello"
        assert (await asked(made, http, "b")).json()["choices"][0]["text"] == "hello", "the cores of a have come back"
        assert list(made.rows()) == ["b.0"]


async def test_a_call_may_say_how_long_it_waits(tiny: Path) -> None:
    async with hosted(tiny, {"a": 2}) as made, client(application(made.catalogues[0])) as http:
        made.stage.gate.clear()
        reply = await http.post("/v1/completions", json={**GO, "model": "a"}, headers={"x-request-timeout-seconds": "0.4"})
        assert reply.status_code == 408 and "a was not awake within" in reply.text, reply.text
        await made.until(lambda: not made.catalogues[0].waking._sleepers["a"].held)


async def test_held_calls_go_when_the_connection_is_there_and_one_look_is_for_all(tiny: Path) -> None:
    """Whoever asks for cards once more is never answered: what is held must not need it. Nobody asks twice at a time, nor begins twice."""
    async with hosted(tiny, {"a": 2}) as made, client(application(made.catalogues[0])) as http:
        entry = made.catalogues[0].entries[0]
        ask, begin, never = entry.replicas.cards, entry._begin, asyncio.Event()
        asking, most, begun = 0, 0, 0

        async def cards() -> Any:
            nonlocal asking, most
            asking, most = asking + 1, max(most, asking + 1)
            try:
                if begun:
                    await never.wait()
                await asyncio.sleep(0)
                return await ask()
            finally:
                asking -= 1

        async def once(card: Any) -> Any:
            nonlocal begun
            begun += 1
            return await begin(card)

        entry.replicas.cards, entry._begin = cards, once
        made.stage.gate.clear()
        calls = [asked(made, http, "a") for _ in range(20)]
        await made.until(lambda: len(made.catalogues[0].waking._sleepers["a"].held) == 20 and made.rows() == {"a.0": "starting"})
        made.stage.gate.set()
        replies = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert [reply.json()["choices"][0]["text"] for reply in replies] == ["hello"] * 20
        assert most == begun == 1
        never.set()


async def test_held_calls_go_to_a_replica_that_serve_does_not_know_yet(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over its own connection, with words that were read while it was loaded; once Serve has it, by Serve."""
    read: list[str] = []
    monkeypatch.setattr("rayneuron.gateway.entry.read_text", lambda config: read.append("late"))
    async with hosted(tiny, {"a": 2}) as made, client(application(made.catalogues[0])) as http:
        made.stage.slow.clear()
        made.stage.gate.clear()
        calls = [asked(made, http, "a", n=n, temperature=1.0) for n in (1, 2)]
        await made.until(lambda: made.rows() == {"a.0": "starting"})
        made.stage.gate.set()
        for reply in await asyncio.gather(*calls):
            assert {choice["text"] for choice in reply.json()["choices"]} == {"hello"}
        refused = await asked(made, http, "a", max_tokens=10_000)
        assert refused.status_code == 400 and made.rows() == {"a.0": "starting"} and not read
        member, replicas = made.stage.wired["a.0"].members[0], made.catalogues[0].entries[0].replicas
        assert len(member.orders) == 2 and not replicas.knows(member.name)
        made.stage.slow.set()
        await made.until(lambda: replicas.knows(member.name) and made.rows() == {"a.0": "ready"})
        assert (await asked(made, http, "a")).json()["choices"][0]["text"] == "hello"
        assert len(member.orders) == 3 and len(member.hub.callers) == 1, "over the same connection"


@pytest.mark.parametrize(("body", "commented"), [({"stream": True}, True), ({}, False)])
async def test_comments_go_to_streams_of_events_alone(body: Any, commented: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayneuron.gateway.waking.SAY_S", 0.1)
    async with hosted(tiny, {"a": 2}) as made, client(application(made.catalogues[0])) as http:
        made.stage.gate.clear()
        made.stage.progress = "weights 3/9"
        headers = {"x-rayneuron-progress": "1"}
        call = asyncio.ensure_future(http.post("/v1/completions", json={**GO, "model": "a", **body}, headers=headers))
        await made.until(lambda: made.catalogues[0].waking._sleepers["a"].replicas.standing.why == "weights 3/9")
        await asyncio.sleep(0.3)  # three times as long as between two comments
        made.stage.gate.set()
        reply = await call
        assert reply.status_code == 200 and (": a loading weights 3/9, about " in reply.text) == commented, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream" if commented else "application/json")


async def sent(app: Any, body: bytes, gone: asyncio.Event, **headers: str) -> int:
    """The status of a call whose client leaves when it is told to; 0 where none was sent."""
    status, parts = 0, [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    path = "/v1/completions"
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in ({"content_type": "application/json"} | headers).items()]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
    await app({**scope, "headers": pairs, "http_version": "1.1", "scheme": "http", "client": None, "server": None}, receive, send)
    return status


async def test_whoever_leaves_while_held_is_forgotten_and_the_start_goes_on(tiny: Path) -> None:
    async with hosted(tiny, {"a": 2}) as made:
        app, gone = application(made.catalogues[0]), asyncio.Event()
        made.stage.gate.clear()
        held = made.catalogues[0].waking._sleepers["a"].held
        calls = [asyncio.ensure_future(sent(app, b'{"model": "a", "prompt": "say:x"}', gone)) for _ in range(20)]
        await made.until(lambda: len(held) == 20 and made.rows() == {"a.0": "starting"})
        gone.set()
        assert await asyncio.gather(*calls) == [0] * 20
        assert not held
        made.stage.gate.set()
        await made.until(lambda: made.rows() == {"a.0": "ready"})


async def test_bodies_that_are_wrong_wake_nobody(tiny: Path) -> None:
    async with hosted(tiny, {"a": 2}, serving={"max_body_bytes": 4096}) as made, client(application(made.catalogues[0])) as http:
        wrong = {b"{": 400, b"[]": 400, b"\xff": 400, b"[" * 4000: 400, b"x" * 5000: 413, b'{"model": "b"}': 404}
        for content, status in wrong.items():
            reply = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert reply.status_code == status and "error" in reply.json(), (content[:20], reply.text)
        assert (await http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})).status_code == 415
        assert (await http.post("/m/a/v1/nothing", json={})).status_code == 404
        assert (await http.get("/m/a/health")).status_code == 503
        assert not made.stage.given and not made.rows()


async def test_two_gateways_wake_it_once_and_each_may_leave_alone(tiny: Path) -> None:
    async with hosted(tiny, {"a": 2}, gateways=2) as made:
        made.stage.gate.clear()
        one, other = (client(application(catalogue)) for catalogue in made.catalogues)
        calls = [asked(made, http, "a") for http in (one, other) for _ in range(3)]
        await made.until(lambda: [len(c.waking._sleepers["a"].held) for c in made.catalogues] == [3, 3] and made.rows())
        made.catalogues[0].leave()  # what SIGTERM does first
        for reply in await asyncio.gather(*calls[:3]):
            assert reply.status_code == 503 and "shutting down" in reply.text and int(reply.headers["retry-after"]) >= 1
        assert (await asked(made, one, "a")).status_code == 503
        made.stage.gate.set()
        assert [reply.status_code for reply in await asyncio.gather(*calls[3:])] == [200, 200, 200]
        assert made.stage.given == [("a.0", (0, 1))]


async def test_more_than_may_be_held_are_told_so(tiny: Path) -> None:
    async with hosted(tiny, {"a": 2}, scaling={"max_held": 2}) as made, client(application(made.catalogues[0])) as http:
        made.stage.gate.clear()
        calls = [asked(made, http, "a") for _ in range(3)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        (full,) = [call.result() for call in done]
        assert full.status_code == 429 and "2 calls wait for a to wake" in full.text and int(full.headers["retry-after"]) >= 1
        made.stage.gate.set()
        assert sorted(reply.status_code for reply in await asyncio.gather(*calls)) == [200, 200, 429]


async def test_calls_wait_for_nodes_that_have_not_answered_yet(tiny: Path) -> None:
    """A gateway that has just come, or a keeper that has: what cannot be had now may be there in a moment."""
    async with hosted(tiny, {"a": 2}) as made, client(application(made.catalogues[0])) as http:
        look = made.arbiter._watchers.look
        for blind in ({}, {"n": {"free": [], "left": [0, 1, 2, 3], "holders": [], "silent": True}}):
            made.arbiter._watchers.look = lambda blind=blind: blind  # type: ignore[method-assign]
            await made.until(lambda blind=blind: made.arbiter._nodes == blind)
            call = asked(made, http, "a")
            await asyncio.wait([call], timeout=1.0)
            assert not call.done() and not made.stage.given, "held"
            call.cancel()
        call = asked(made, http, "a")
        made.arbiter._watchers.look = look  # type: ignore[method-assign]
        assert (await call).json()["choices"][0]["text"] == "hello"


class Seat:
    """The way to the replicas of a seat. Serve is slow: whoever asks it for a replica that it does not know yet waits for ever."""

    def __init__(self) -> None:
        self.early_card: Card | None = None
        self.served: list[Card] = []

    async def early(self) -> Card | None:
        return self.early_card

    async def cards(self) -> list[Card]:
        assert self.served, "this would wait for Serve"
        return self.served


async def test_each_life_of_a_seat_is_seen_before_serve_knows_it() -> None:
    """A seat's name is used again: that Serve knew a replica of it once says nothing of the one that comes now."""
    nothing: dict[str, Any] = dict.fromkeys(("user_config", "model", "profile"))
    sizes: dict[str, Any] = dict.fromkeys(("rows", "length", "kv_tokens", "block", "vocab"), 1)
    maps: dict[str, Any] = {name: {} for name in ("args", "generation", "chosen", "adapters")}
    seat = Seat()
    replicas = SeatReplicas(lambda name: seat)  # type: ignore[arg-type, return-value]
    for life in ("r1", "r2", "r3"):
        card = Card(replica=life, epoch=life.encode(), address="", token=b"", **nothing, **sizes, **maps)
        replicas.standing = Standing("loading", coming=["a.0"])
        seat.early_card, seat.served = None, []
        assert await replicas.cards() == []
        seat.early_card = card
        assert await replicas.cards() == [card] and not replicas.knows(life), "its orders go over its connection"
        seat.served, replicas.standing = [card], Standing("ready", seats=["a.0"])
        assert await replicas.cards() == [card] and replicas.knows(life)
        replicas.standing = Standing("sleeping")
        assert await replicas.cards() == []
