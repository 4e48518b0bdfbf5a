"""One choice, or one call, that fails: its own end, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rayneuron.api import call as api
from rayneuron.engine.host_sampling import HostSampling
from rayneuron.errors import RequestError
from rayneuron.serve.flight import ActiveRequest
from rayneuron.text.assembler import Assembler
from rayneuron.types import Request, SamplingParams
from tests.serve.real import serving

SMALL = {"max_model_len": 128, "max_num_seqs": 8, "prefill_chunk_tokens": 32}
BODY = {"prompt": "go on", "max_tokens": 6, "n": 3, "temperature": 1, "seed": 1, "ignore_eos": True, "logit_bias": {"9": 0.0}}
CHAT = {**{name: value for name, value in BODY.items() if name != "prompt"}, "messages": [{"role": "user", "content": "go on"}]}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Choices whose third token cannot be told."""
    failing: set[int] = set()
    sample = HostSampling.next_id

    def stumble(self: HostSampling, row: Any, sequence: Any, taken: int | None) -> int:
        if sequence.index in failing and sequence.generated == 2:
            raise ValueError("a secret of the machine")
        return sample(self, row, sequence, taken)

    monkeypatch.setattr(HostSampling, "next_id", stumble)
    return failing


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_choice_that_fails_ends_alone(tiny: Path, broken: set[int], path: str, caplog: pytest.LogCaptureFixture) -> None:
    body: dict[str, Any] = BODY if path == "/v1/completions" else CHAT
    async with serving(tiny, **SMALL) as server:
        _, whole = await server.post(path, json.dumps(body).encode())
        broken.add(1)
        with caplog.at_level(logging.ERROR, logger="rayneuron"):
            status, reply = await server.post(path, json.dumps(body).encode())
        assert status == 200 and b"secret" not in reply and "a secret of the machine" in caplog.text
        good, got = json.loads(whole)["choices"], json.loads(reply)["choices"]
        assert (got[0], got[2]) == (good[0], good[2])
        assert got[1]["finish_reason"] == "error" and "log has the details" in got[1]["stop_reason"]
        assert json.loads(reply)["usage"]["completion_tokens"] == 14
        status, raw = await server.post(path, json.dumps(body | {"stream": True}).encode())
        chunks = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
        ends = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
        assert status == 200 and raw.endswith(b"data: [DONE]\n\n") and ends == {0: "length", 1: "error", 2: "length"}
        broken |= {0, 2}
        status, reply = await server.post(path, json.dumps(body).encode())
        assert status == 500 and b"log has the details" in reply and b"secret" not in reply
        await server.settle()


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_left_to_choose_is_the_requests_fault(tiny: Path, stream: bool) -> None:
    async with serving(tiny, **SMALL) as server:
        body = {"prompt": "go on", "max_tokens": 6, "allowed_token_ids": [50], "no_repeat_ngram_size": 1, "stream": stream}
        status, reply = await server.post("/v1/completions", json.dumps(body).encode())
        if stream:
            error = json.loads(reply.split(b"data: ")[-2])["error"]
            assert status == 200 and (error["code"], error["type"]) == (400, "BadRequestError")
        else:
            assert status == 400 and b"no token is left" in reply
        for wrong in ({"banned_token_ids": [50]}, {"stop_token_ids": [50], "min_tokens": 2}):
            wrong["allowed_token_ids"] = [50]
            status, reply = await server.post("/v1/completions", json.dumps({"prompt": "a", "max_tokens": 4} | wrong).encode())
            assert (status, json.loads(reply)["error"]["param"]) == (400, "allowed_token_ids")
        await server.settle()


async def test_a_second_call_of_one_id_leaves_the_first_alone(tiny: Path) -> None:
    async with serving(tiny, **SMALL) as served:
        server = served.server
        text = server.served.opened.text

        def actives() -> list[ActiveRequest]:
            params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
            return [ActiveRequest(r, Assembler(r, text)) for r in (Request(id="same-0", prompt_ids=[20, 21], params=params),)]

        first = server.served.flights.open(actives())
        with pytest.raises(RequestError, match="'same-0' is in use"):
            server.served.flights.open(actives())
        deltas = await first.finish()
        assert [(d.finish_reason, d.usage and d.usage.completion_tokens) for d in deltas] == [("length", 40)]
        server.served.flights.close(first)
        await served.settle()


async def test_priority_is_the_deployments_to_allow(tiny: Path) -> None:
    async with serving(tiny, **SMALL) as served:
        body = {"prompt": "go", "max_tokens": 2, "priority": -5}
        status, reply = await served.post("/v1/completions", json.dumps(body).encode())
        error = json.loads(reply)["error"]
        assert (status, error["param"]) == (400, "priority") and "limits.client_priority" in error["message"]
        assert (await served.post("/v1/completions", json.dumps(body | {"priority": 0}).encode()))[0] == 200
        served.server.reconfigure({"limits": {"client_priority": True}})
        assert (await served.post("/v1/completions", json.dumps(body).encode()))[0] == 200
        served.server.reconfigure({"limits": {}})
        assert (await served.post("/v1/completions", json.dumps(body).encode()))[0] == 400


async def test_a_large_reply_is_put_together_beside_the_streams(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of probabilities as JSON take long enough that no stream should wait for them."""
    import threading

    threads: list[str] = []
    async with serving(tiny, **SMALL) as served:
        reply = api.Call.reply
        monkeypatch.setattr(api.Call, "reply", lambda *a: (threads.append(threading.current_thread().name), reply(*a))[1])
        large = {"prompt": [9] * 120, "max_tokens": 1, "prompt_logprobs": 20}
        answers = await asyncio.gather(*(served.post("/v1/completions", json.dumps(b).encode()) for b in (large, {"prompt": "a"})))
        assert [status for status, _ in answers] == [200, 200]
    assert sorted(name.startswith("rayneuron-text") for name in threads) == [False, True]
