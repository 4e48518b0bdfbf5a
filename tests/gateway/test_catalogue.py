"""The gateway as its callers see it: which model, whose key, what is said of all models, and why a reply came from where."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rayneuron.gateway.asking import equal
from rayneuron.gateway.routes import application
from tests.gateway.fleet import House, house, scripted
from tests.gateway.test_remote import client
from tests.policies.profiles import engine, profile
from tests.serve.scripted import opener_of

GO = {"prompt": "say:hello", "max_tokens": 20}


def digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def two(tiny: Path) -> dict[str, Any]:
    return {"first": scripted(tiny, 1, "chat"), "second": scripted(tiny, 1, "coder")}


async def test_a_call_means_the_model_its_path_header_or_body_names(tiny: Path) -> None:
    async with house(two(tiny), {"default_model": "coder"}) as made, client(application(made.catalogue)) as http:

        async def answered(path: str = "", headers: Any = None, **body: Any) -> str:
            reply = await http.post(f"{path}/v1/completions", json={**GO, **body}, headers=headers)
            return str(reply.json().get("model") or reply.json()["error"]["message"])

        assert await answered() == "coder"
        assert await answered(model="chat") == "chat" and await answered(model="first") == "first"
        assert await answered("/m/chat") == "chat" and await answered("/m/first", {"x-amzn-sagemaker-target-model": "coder"}) == "chat"
        assert await answered(headers={"x-amzn-sagemaker-target-model": "chat"}) == "chat"
        assert await answered(model="x") == "The model `x` does not exist. There are: chat, coder"
        assert await answered("/m/chat", model="coder") == "The model `coder` does not exist. There are: chat, first"
        assert (await http.post("/v1/completions", json={**GO, "model": "x"})).status_code == 404
        assert (await http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})).status_code == 400
        assert (await http.post("/tokenize", json={"model": "chat", "prompt": "ab"})).json()["count"] > 0
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["rayneuron"]) for card in listed] == [
            (name, {"state": "ready"}) for name in ("chat", "first", "coder", "second")
        ]
        assert (await http.get("/m/chat/v1/models")).json()["data"][0]["id"] == "chat"
        assert (await http.get("/m/coder/health")).status_code == (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("slash", ["/", "%2F", "%2f"])
async def test_a_name_with_slashes_is_a_path_too(tiny: Path, slash: str) -> None:
    """The longest that is known goes first, wherever a path names a model; what nobody knows is told as it was meant."""
    models = {name: scripted(tiny, 1, said) for name, said in (("one", "org"), ("two", "org/chat"), ("three", "org/chat/x"))}
    lmi = {"inputs": "say:hello", "parameters": {"max_new_tokens": 5}}
    async with house(models) as made, client(application(made.catalogue)) as http:

        async def answered(name: str, path: str = "/v1/completions") -> str:
            reply = await http.post(f"/m/{name.replace('/', slash)}{path}", json=GO)
            return str(reply.json().get("model") or reply.json()["error"]["message"])

        for name in ("org", "org/chat", "org/chat/x"):
            assert await answered(name) == name
            spelled = name.replace("/", slash)
            assert (await http.get(f"/m/{spelled}/v1/models")).json()["data"][0]["id"] == name
            assert (await http.get(f"/m/{spelled}")).headers["location"] == f"/m/{name}/"
            assert "<html" in (await http.get(f"/m/{spelled}/")).text
            for path in (f"/models/{spelled}/invoke", f"/predictions/{spelled}"):
                reply = await http.post(path, json=lmi)
                assert reply.status_code == 200 and reply.json()["generated_text"].startswith("hell"), reply.text
            assert (await http.get(f"/models/{spelled}")).json()[0]["modelName"] == name
            assert (await http.get(f"/models/{spelled}/adapters")).json() == {"adapters": []}
            assert (await http.delete(f"/models/{spelled}/adapters/a{slash}b")).json()["type"] == "BadRequestException"
        assert await answered("org/nope") == "The model `org/nope` does not exist. There are: org, org/chat, org/chat/x"
        assert await answered("nope") == "The model `nope` does not exist. There are: org, org/chat, org/chat/x"
        for path in ("/m/", "/m//", "/m/org/nothing", "/m/nope/nothing/at/all", "/m/org/chat/nothing", "/models/", "/predictions/"):
            assert (await http.post(path, json=GO)).status_code == 404, path


async def test_several_models_and_no_default_need_a_name(tiny: Path) -> None:
    async with house(two(tiny)) as made, client(application(made.catalogue)) as http:
        reply = await http.post("/v1/completions", json=GO)
        assert reply.status_code == 404 and "none by default; name one as `model`: chat, coder" in reply.text


async def test_models_are_those_of_the_file(tiny: Path) -> None:
    """Whoever manages models by HTTP, in LMI's words or SageMaker's, is told which are there, and how more come."""
    async with house(two(tiny)) as made, client(application(made.catalogue)) as http:
        for asked in ({"params": {"model_name": "coder", "url": "s3://b"}}, {"json": {"model_name": "second", "url": "s3://b"}}):
            reply = await http.post("/models", **asked)
            assert (reply.status_code, reply.json()["type"]) == (409, "ConflictStatusException"), reply.text
        for asked in ({"params": {"model_name": "third", "url": "s3://b"}}, {"json": {"model_name": "third", "url": "s3://b"}}):
            reply = await http.post("/models", **asked)
            assert reply.status_code == 400 and "models of a gateway" in reply.json()["message"], reply.text
        for asked in ({"json": {"url": "s3://b"}}, {"json": {"model_name": 5}}, {"json": []}, {"content": b"{"}):
            reply = await http.post("/models", headers={"content-type": "application/json"}, **asked)
            assert reply.status_code == 400 and set(reply.json()) == {"code", "type", "message"}, reply.text
        assert (await http.delete("/models/coder")).status_code == 400
        assert (await http.delete("/models/third")).status_code == 404


async def test_keys_say_whose_a_call_is(tiny: Path) -> None:
    tenants = {"acme": {"keys": [digest("ka")], "max_waiting": 1}, "other": {"keys": [digest("kb")]}}
    words = {"tenants": tenants, "serving": {"api_keys": [digest("kc")]}}
    async with house({"scripted": scripted(tiny, 1)}, words) as made, client(application(made.catalogue)) as http:
        for key, status in (("ka", 200), ("kb", 200), ("kc", 200), ("kd", 401), ("", 401)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert (await http.post("/v1/completions", json=GO, headers=headers)).status_code == status
            assert (await http.get("/v1/models", headers=headers)).status_code == status
        assert (await http.get("/health")).status_code == 200
        assert [made.catalogue.account(key) for key in (b"ka", b"kb", b"kc", b"kd")] == ["acme", "other", "default", None]
        for headers in ({"x-api-key": "ka"}, {"authorization": "bearer ka"}, {"authorization": "Basic kb", "x-api-key": "ka"}):
            await http.post("/v1/completions", json=GO, headers=headers)
            assert made.catalogue._whose({name.encode(): value.encode() for name, value in headers.items()}) == "acme"
        assert (await http.post("/v1/completions", json=GO, headers={"authorization": "Basic ka"})).status_code == 401


async def test_a_full_account_is_told_when_to_come_again_and_the_others_are_not(tiny: Path) -> None:
    tenants = {"acme": {"keys": [digest("ka")], "max_waiting": 2}, "other": {"keys": [digest("kb")]}}
    async with house({"scripted": scripted(tiny, 1, rows=2)}, {"tenants": tenants}) as made, client(application(made.catalogue)) as http:
        made.members[0].engine.runner.hold()

        def ask(key: str) -> asyncio.Future[Any]:
            body = {"prompt": "go on", "max_tokens": 20, "ignore_eos": True}
            return asyncio.ensure_future(http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}))

        calls = []
        while made.engine.desk.open["waiting"] < 2:
            calls.append(ask("ka"))
            await made.until(lambda: sum(made.engine.under_way()) == len(calls))
        refused = await ask("ka")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1 and "of this account wait" in refused.text
        calls.append(ask("kb"))
        await made.until(lambda: sum(made.engine.under_way()) == len(calls))
        made.members[0].engine.runner.free()
        assert {reply.status_code for reply in await asyncio.gather(*calls)} == {200}
        await made.settle()


async def test_a_reply_says_where_it_came_from_and_why(tiny: Path) -> None:
    async with house({"scripted": scripted(tiny)}) as made, client(application(made.catalogue)) as http:
        wanted = r"replica=scripted#[01]; cost=[\d.]+; queue=[\d.]+; prefill=[\d.]+; added=[\d.]+; overlap=\d+/\d+; of=2; "
        wanted += r"second=\S+; waited=[\d.]+; why=\w+"
        for stream in (False, True):
            reply = await http.post("/v1/completions", json={**GO, "stream": stream}, headers={"x-rayneuron-explain": "1"})
            assert re.fullmatch(wanted, reply.headers["x-rayneuron-route"]), reply.headers
        assert "x-rayneuron-route" not in (await http.post("/v1/completions", json=GO)).headers
        assert (await http.get("/debug/routes")).status_code == 400, "not for everybody"
    async with house({"scripted": scripted(tiny)}, {"explain": True}) as made, client(application(made.catalogue)) as http:
        assert "x-rayneuron-route" in (await http.post("/v1/completions", json=GO)).headers
        await http.post("/v1/completions", json=GO)
        decisions = (await http.get("/debug/routes?n=1")).json()
        assert [(d["model"], d["order"] > 0, d["of"]) for d in decisions] == [("scripted", True, 2)]
        assert len((await http.get("/debug/routes")).json()) == 2
        assert (await http.get("/debug/routes?n=x")).status_code == 400


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
async def test_a_goal_is_a_number_of_milliseconds(tiny: Path, value: str) -> None:
    async with house({"scripted": scripted(tiny, 1)}) as made, client(application(made.catalogue)) as http:
        reply = await http.post("/v1/completions", json=GO, headers={"x-slo-ttft-ms": value})
        assert reply.status_code == 400 and f"x-slo-ttft-ms must be a number of milliseconds above 0, got {value!r}" in reply.text
        assert not made.engine.wishes
        assert (await http.post("/v1/completions", json=GO, headers={"x-slo-ttft-ms": "500"})).status_code == 200


async def test_what_it_measures(tiny: Path) -> None:
    async with house(two(tiny), {"default_model": "chat"}) as made, client(application(made.catalogue)) as http:
        for _ in range(3):
            await http.post("/v1/completions", json=GO)
        entry = next(entry for entry in made.catalogue.entries if "chat" in entry.names)
        entry.now.context.scan.counted("hermes", 2, 0)  # as whoever reads an answer does
        lines = (await http.get("/metrics")).text.splitlines()
        heads = [line for line in lines if line.startswith("# HELP")]
        assert len(heads) == len(set(heads)), "every family once"

        def value(name: str, model: str) -> float:
            return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and f'model_name="{model}"' in line)

        assert value("rayneuron:gateway_ttft_seconds_count", "chat") == 3 and value("rayneuron:gateway_ttft_seconds_count", "coder") == 0
        assert value("rayneuron:gateway_tool_calls_total", "chat") == 2 and value("rayneuron:gateway_tool_calls_total", "coder") == 0
        assert value("rayneuron:gateway_replicas", "chat") == value("rayneuron:gateway_replicas", "coder") == 1
        assert value("rayneuron:gateway_requests", "chat") == 0 and value("rayneuron:gateway_link_frames_total", "chat") > 3
        assert value("vllm:time_to_first_token_seconds_count", "chat") == 3, "the replica's own, once"


async def test_what_is_measured_of_one_model_has_every_family_once(tiny: Path) -> None:
    """However many replicas it has."""
    async with house({"scripted": scripted(tiny, 2)}) as made, client(application(made.catalogue)) as http:
        heads = [line for line in (await http.get("/m/scripted/metrics")).text.splitlines() if line.startswith("# HELP")]
        assert heads and len(heads) == len(set(heads))


async def test_another_user_config_of_the_replicas_is_read_by_the_gateway(tiny: Path) -> None:
    async with house({"scripted": scripted(tiny, 1)}) as made, client(application(made.catalogue)) as http:
        body = {"prompt": "go", "ignore_eos": True}
        assert (await http.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 16
        made.members[0].replica.reconfigure({"sampling_defaults": {"max_tokens": 3}})
        await made.catalogue.entries[0].look()
        assert (await http.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 3


async def test_an_application_deployed_anew_answers_and_calls_that_came_before_end_as_they_began(tiny: Path) -> None:
    async with house({"scripted": scripted(tiny, 1)}) as made:
        old = made.members[0]
        old.engine.runner.hold()
        call = asyncio.ensure_future(made.catalogue.completions({"prompt": "go", "max_tokens": 30, "ignore_eos": True}))
        await made.until(lambda: old.orders)
        from tests.gateway.fleet import Member

        args = {"model": {"path": str(tiny), "name": "renamed"}}
        fresh = Member(args, opener_of(tiny), "scripted#new")
        await fresh.open()
        made.members[:] = [fresh]  # Serve lists a replica that drains no more
        await made.until(lambda: "renamed" in made.catalogue.entries[0].names)
        assert (await made.catalogue.completions({**GO, "model": "renamed"}))["choices"][0]["text"] == "hello"
        old.engine.runner.free()
        assert (await call)["usage"]["completion_tokens"] == 30
        await old.close()


async def test_equal_replicas_of_a_node_are_chosen_by_one_profile(tiny: Path) -> None:
    """Two that start together measure beside each other, and one of them in a busier moment: what each says of its steps differs by the
    moment alone. Predictions are made by each one's own."""
    from tests.gateway.fleet import Member

    slow, quick = profile(engine()), profile(engine(), speed=1.7)
    wide = profile(engine(rows=16), speed=1.7)
    said: list[dict[str, Any]] = [{"profile": slow}, {"profile": quick}, {"profile": quick, "chosen": {"cores": 9}}, {"profile": wide}]
    async with house({"scripted": scripted(tiny, 1)}) as made:
        for measured in said:
            member = Member({"model": {"path": str(tiny), "name": "scripted"}}, opener_of(tiny), f"scripted#{len(made.members)}")
            member.measured = measured
            await member.open()
            made.members.append(member)
            await made.until(lambda: len(made.engine.fleet.able) == len(made.members))
        known = list(made.engine.desk.chooser.workers.all.values())[1:]
        assert [worker.costs.profile for worker in known] == [slow, slow, quick, wide]
        assert known[1].now is not None and known[1].now.prefill_ms(known[1].costs, 256, 0, 0, 0) < known[0].costs.prefill(256, 0)[0]
        card = made.engine.fleet.able[1].link.card
        assert equal(card, replace(card, address=card.address.replace("127.0.0.1:", "127.0.0.1:1")))
        assert not equal(card, replace(card, address="10.0.0.1:7000"))


async def test_a_gateway_whose_copy_of_the_args_differs_says_so(tiny: Path) -> None:
    said = {"model": {"path": str(tiny), "name": "scripted"}, "max_num_seqs": 3}
    members = scripted(tiny, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            async with house({"scripted": members}, {"models": [{"application": "scripted", "args": said}]}):
                pass


async def test_it_leaves_before_its_replicas(tiny: Path) -> None:
    async with house({"scripted": scripted(tiny)}) as made, client(application(made.catalogue)) as http:
        made.hold()
        call = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": "say:last words", "max_tokens": 40}))
        await made.until(lambda: any(member.orders for member in made.members))
        draining = asyncio.ensure_future(made.catalogue.drain(60.0))
        await made.until(lambda: made.catalogue.entries[0].state != "ready")
        refused = await http.post("/v1/completions", json=GO)
        assert refused.status_code == 503 and "shutting down" in refused.text and "retry-after" in refused.headers
        assert (await http.get("/health")).status_code == 503
        made.free()
        assert (await call).json()["choices"][0]["text"] == "last words"
        await draining


def test_it_runs_on_the_event_loop_that_serve_uses(tiny: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def once() -> str:
        async with house({"scripted": scripted(tiny, 1)}) as made:
            said: House = made
            reply = await said.catalogue.completions(GO)
            return str(reply["choices"][0]["text"])

    assert uvloop.run(once()) == "hello"
