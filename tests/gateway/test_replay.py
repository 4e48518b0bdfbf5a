"""Replicas with a real engine that are lost in the middle: whatever a request asks for, its answer is that of the run without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rayneuron import loading
from rayneuron.api.adapters import Change
from rayneuron.errors import RequestError
from rayneuron.gateway.routes import application
from tests.gateway.fleet import House, house
from tests.gateway.test_remote import client
from tests.models import adapters as adapted
from tests.serve.real import serving

WAYS = [
    pytest.param({"dtype": "fp32"}, id="fp32"),
    pytest.param({"dtype": "bf16"}, id="bf16", marks=pytest.mark.slow),
    pytest.param({"dtype": "bf16", "quantization": "int8"}, id="int8", marks=pytest.mark.slow),
]
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "choices": {"n": 4, "temperature": 1, "seed": 2**63 - 2},
    "penalties": {"temperature": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 30, "seed": 3},
    "logprobs": {"temperature": 1, "seed": 4, "logprobs": 2},
    "no seed": {"temperature": 1},
    "min_tokens": {"temperature": 0, "min_tokens": 30, "ignore_eos": False},
    "constrained": {"temperature": 1, "seed": 5, "structured_outputs": {"regex": "[a-f]{50,70}( [x-z]{3,9}){9}"}},
    "prompts": {"prompt": ["a", "bc", "def", "ghij"], "temperature": 0},
}


@pytest.fixture(params=WAYS)
async def two(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[House]:
    args = {
        "model": {"path": str(tiny), "name": "tiny"}, "max_model_len": 256, "max_num_seqs": 8, "threads": 1, "seed": 11, **request.param,
    }  # fmt: skip
    async with house({"tiny": [(args, loading.open_engine)] * 2}) as made:
        yield made


async def interrupted(made: House, body: dict[str, Any], after: int) -> tuple[dict[str, Any], int]:
    """The reply to a body, one replica of which died once some choice had got so many tokens; and how many choices went on elsewhere."""
    before = sum(made.engine.repair.counts.values())
    call = asyncio.ensure_future(made.catalogue.completions(body))
    victim = None
    while not call.done() and victim is None:
        await asyncio.sleep(0)
        for way in made.engine.books.placed.values():
            if way.worker is not None and any(len(replay.ids) >= after for replay in way.replays.values()):
                victim = made.engine.fleet.workers[way.worker]
    if victim is not None and not call.done():
        member = next(m for m in made.members if m.name == victim.link.card.replica)
        for caller in list(member.hub.callers.values()):
            caller.hang_up()
    reply = await call
    await made.until(lambda: len(made.engine.fleet.able) == 2)
    return reply, sum(made.engine.repair.counts.values()) - before


def told(reply: dict[str, Any]) -> Any:
    choices = [(choice["text"], choice["finish_reason"], choice["logprobs"]) for choice in reply["choices"]]
    return choices, reply["usage"]["completion_tokens"]


async def test_what_cannot_be_compiled_is_a_400_with_its_field(two: House) -> None:
    """The replica says so, and no other one is tried."""
    for body in ({**LONG, "guided_regex": "("}, {**LONG, "guided_regex": "(", "n": 2, "temperature": 1, "stream": True}):
        with pytest.raises(RequestError, match="could be held") as caught:
            found = await two.catalogue.completions(body)
            [chunk async for chunk in found]
        assert caught.value.param == "guided_regex" and not two.engine.repair.counts
    await two.settle()


async def test_what_steps_take_now_is_heard_of_with_the_cards(two: House) -> None:
    """And only what a replica has measured anew; the one of which nothing has changed is as it was."""
    workers = two.engine.desk.chooser.workers.all
    known = {worker.name: worker.now for worker in workers.values()}
    await two.catalogue.entries[0].look()
    assert all(worker.now is known[worker.name] for worker in workers.values())
    for _ in range(3):
        await two.catalogue.completions(LONG)
    ran = {member.name for member in two.members if member.orders}
    await two.catalogue.entries[0].look()
    assert {worker.name for worker in workers.values() if worker.now is not known[worker.name]} == ran and ran


async def test_every_answer_is_that_of_the_run_without(two: House) -> None:
    went_on = 0
    for kind, params in KINDS.items():
        body = {**LONG, **params}
        seeds = two.catalogue.entries[0].newest.seeds  # type: ignore[union-attr]
        made = seeds._made
        wanted = told(await two.catalogue.completions(body))
        for after in (0, 1, 20, 38):
            seeds._made = made  # who sends no seed gets the deployment's next
            reply, lost = await interrupted(two, body, after)
            assert told(reply) == wanted, (kind, after)
            went_on += lost
        await two.settle()
    assert went_on > 15, "most of them were lost in the middle"


def note_drafts(engine: Any, into: list[tuple[int, int]]) -> None:
    """Of every step how many drafts a row tried, and how many came true."""
    step = engine.step

    def stepped() -> Any:
        deltas = step()
        into.extend(engine.info.drafts)
        return deltas

    engine.step = stepped


DRAFTS: dict[str, dict[str, Any]] = {
    "lookup": {"prompt_lookup_min": 1},
    "int8 copy": {"method": "draft_model", "quantization": "int8", "num_speculative_tokens": 4},
}
ASKED: dict[str, dict[str, Any]] = {
    **{name: params for name, params in KINDS.items() if name != "no seed"},
    "beams": {"use_beam_search": True, "n": 2},
    "best of": {"temperature": 1, "seed": 6, "n": 1, "best_of": 3},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 1, "echo": True, "logprobs": 1},
    "bans": {"temperature": 0, "bad_words": ["e", "th"], "no_repeat_ngram_size": 3},
    "bias": {"temperature": 0.7, "seed": 7, "logit_bias": {"20": 5, "30": 5}, "top_p": 0.8},
    "few": {"temperature": 0, "max_tokens": 1},
}


@pytest.mark.parametrize("drafts", DRAFTS)
async def test_drafts_change_no_answer_through_a_gateway(tiny: Path, drafts: str) -> None:
    """Nor one that goes on elsewhere in the middle of a run of drafts: all is that of a replica alone, without drafts."""
    words = {"max_model_len": 256, "max_num_seqs": 8}
    async with serving(tiny, **words, speculative_config=False) as alone:
        wanted = {kind: await alone.server.completions({**LONG, **params}) for kind, params in ASKED.items()}
        text = wanted["greedy"]["choices"][0]["text"]
        stops = {"temperature": 0, "stop": [text[9:12], text[20:24]]}
        wanted["stop"] = await alone.server.completions({**LONG, **stops})
    model = {"path": str(tiny), "name": "tiny"}
    args = {"model": model, "dtype": "fp32", "threads": 1, **words, "speculative_config": {**DRAFTS[drafts], "adaptive": False}}
    async with house({"tiny": [(args, loading.open_engine)] * 2}) as made:
        went_on, tried = 0, list[tuple[int, int]]()
        for member in made.members:
            note_drafts(member.engine, tried)
        for kind, params in {**ASKED, "stop": stops}.items():
            for after in (1000, 5):
                reply, lost = await interrupted(made, {**LONG, **params}, after)
                assert told(reply) == told(wanted[kind]), (kind, after)
                went_on += lost
        await made.settle()
        assert went_on > 5 and sum(true for _, true in tried) > 100


async def test_a_stop_and_a_character_across_the_cut(two: House) -> None:
    """What the text's own state remembers does not move: half a character, half a stop string."""
    whole = (await two.catalogue.completions({**LONG, "temperature": 0}))["choices"][0]["text"]
    stop = whole[12:16]
    wanted = told(await two.catalogue.completions({**LONG, "temperature": 0, "stop": [stop]}))
    for after in range(4, 18, 2):
        reply, _ = await interrupted(two, {**LONG, "temperature": 0, "stop": [stop]}, after)
        assert told(reply) == wanted
    await two.settle()


async def test_adapters_are_called_as_models_and_go_on_elsewhere(tiny: Path, tmp_path: Path) -> None:
    """Listed, chosen by name, unknown where not every replica has them; of what two models have the path says whose."""
    for i, name in enumerate("abc"):
        adapted.write(tmp_path / name, tiny, r=4, seed=i, size=0.2)
    lora = {"directory": str(tmp_path), "allow_runtime_updating": True}

    def words(name: str, *names: str) -> dict[str, Any]:
        modules = {each: str(tmp_path / each) for each in names}
        model = {"path": str(tiny), "name": name}
        return {"model": model, "dtype": "fp32", "max_model_len": 256, "threads": 1, "lora": {**lora, "lora_modules": modules}}

    body = {**LONG, "temperature": 0}
    async with serving(tiny, **words("tiny", *"abc")) as alone:
        wanted = {name: (await alone.server.completions({**body, "model": name}))["choices"] for name in ("tiny", *"abc")}
    assert len({str(choices) for choices in wanted.values()}) == 4
    applications = {"one": [(words("tiny", "a", "b"), loading.open_engine)] * 2, "two": [(words("other", "b"), loading.open_engine)]}
    async with house(applications) as made, client(application(made.catalogue)) as http:

        async def asked(path: str = "", **more: Any) -> tuple[int, Any]:
            reply = await http.post(f"{path}/v1/completions", json={**body, **more})
            return reply.status_code, reply.json().get("choices") or reply.json()["error"]["message"]

        listed = {card["id"]: card["parent"] for card in (await http.get("/v1/models")).json()["data"] if card.get("parent")}
        assert listed == {"a": "tiny", "b": "other"} and (await http.get("/v1/models/a")).json()["parent"] == "tiny"
        assert await asked(model="tiny") == (200, wanted["tiny"]) and await asked(model="a") == (200, wanted["a"])
        assert await asked("/m/tiny", model="b") == await asked(model="tiny", adapters="b") == (200, wanted["b"])
        assert (await asked(model="b"))[0] == 400 and "call it under /m/tiny/ or /m/other/" in (await asked(model="b"))[1]
        for wrong in ({"model": "c"}, {"model": "tiny", "adapters": "c"}, {"path": "/m/a"}, {"path": "/m/other", "model": "a"}):
            assert (await asked(**wrong))[0] == 404, wrong
        moved = 0
        for _ in range(10):  # forty tokens of a small model may have come before anybody looks
            reply, moved = await interrupted(made, {**body, "model": "a"}, 5)
            assert reply["choices"] == wanted["a"]
            if moved:
                break
        assert moved == 1
        for there, status in zip(made.members, (404, 200), strict=True):
            await there.replica.change_adapters(Change("c", "c"))
            await made.catalogue.entries[0].look()
            assert (await asked(model="c"))[0] == status
        assert await asked(model="c") == (200, wanted["c"])
        await made.members[0].replica.change_adapters(Change("c"))
        await made.catalogue.entries[0].look()
        assert (await asked(model="c"))[0] == 404
        await made.settle()
