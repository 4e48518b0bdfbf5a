"""Every dialect over HTTP: what a call answers, whole and streamed, and each class of error in the dialect's own shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron.errors import NotReady
from rayneuron.serve.verbs import Shut
from tests.serve.scripted import PATIENCE_S, Site, eventually, site
from tests.serve.wire import Wire

USER = [{"role": "user", "content": "hello"}]
ASK: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/generate": {"prompt": "hello", "max_tokens": 4},
    "/": {"inputs": "hello", "parameters": {"max_new_tokens": 4}},
    "/generate_stream": {"inputs": "hello", "parameters": {"max_new_tokens": 4}},
    "/invocations": {"inputs": "hello", "parameters": {"max_new_tokens": 4}},
    "/predictions/scripted": {"inputs": "hello", "parameters": {"max_new_tokens": 4}},
    "/models/scripted/invoke": {"inputs": "hello", "parameters": {"max_new_tokens": 4}},
}
OPENAI, ANTHROPIC, TGI, LMI = "openai", "anthropic", "tgi", "lmi"
SPEAKS = dict.fromkeys(ASK, OPENAI) | {"/v1/messages": ANTHROPIC, "/": TGI, "/generate_stream": TGI}
SPEAKS |= dict.fromkeys(("/invocations", "/predictions/scripted", "/models/scripted/invoke"), LMI)
# Class of error -> the status in each dialect.
STATUS = {
    "json": {OPENAI: 400, ANTHROPIC: 400, TGI: 422, LMI: 424},
    "field": {OPENAI: 400, ANTHROPIC: 400, TGI: 422, LMI: 424},
    "model": {OPENAI: 404, ANTHROPIC: 404, TGI: 404, LMI: 404},
    "method": {OPENAI: 405, ANTHROPIC: 405, TGI: 405, LMI: 405},
    "media": {OPENAI: 415, ANTHROPIC: 415, TGI: 415, LMI: 415},
    "length": {OPENAI: 413, ANTHROPIC: 413, TGI: 413, LMI: 413},
    "key": {OPENAI: 401, ANTHROPIC: 401, TGI: 401, LMI: 401},
    "busy": {OPENAI: 429, ANTHROPIC: 429, TGI: 429, LMI: 503},
    "loading": {OPENAI: 503, ANTHROPIC: 529, TGI: 503, LMI: 503},
    "late": {OPENAI: 408, ANTHROPIC: 408, TGI: 424, LMI: 408},
    "broken": {OPENAI: 503, ANTHROPIC: 529, TGI: 503, LMI: 503},
}


def held(reply: httpx.Response, path: str, kind: str) -> str:
    """The message of an error; that status and shape are the dialect's is asserted."""
    speaks = SPEAKS[path]
    assert reply.status_code == STATUS[kind][speaks], (path, kind, reply.text)
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    if speaks == OPENAI:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]["message"]
    if speaks == ANTHROPIC:
        assert set(body) == {"type", "error"} and body["type"] == "error" and set(body["error"]) == {"type", "message"}
        return body["error"]["message"]
    if speaks == TGI:
        assert set(body) == {"error", "error_type"}
        return body["error"]
    assert body["code"] == reply.status_code and set(body) in ({"error", "code"}, {"code", "type", "message"})
    return body.get("error") or body["message"]


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Site]:
    """One row, little patience, a short limit of bodies, and a key."""
    limits = {"max_waiting": 2, "max_body_bytes": 4096}
    with site(tiny, {"limits": limits}, rows=1) as running:
        yield running


@pytest.mark.parametrize("path", ASK)
def test_each_class_of_error(narrow: Site, path: str) -> None:
    with httpx.Client(base_url=narrow.url, timeout=PATIENCE_S) as http:
        ask, wrong = ASK[path], {"content-type": "application/json"}
        assert "JSON" in held(http.post(path, content=b"{nope", headers=wrong), path, "json")
        named = "temperature" if "parameters" not in ask else "parameters.temperature"
        field = {"temperature": "hot"} if "parameters" not in ask else {"parameters": {"temperature": "hot"}}
        assert named in held(http.post(path, json=ask | field), path, "field")
        if "models" not in path and "predictions" not in path:  # the path names it there
            assert "other" in held(http.post(path, json=ask | {"model": "other"}), path, "model")
            if path != "/":  # that is the page's
                reply = http.get(path)
                assert "GET" in held(reply, path, "method") and "POST" in reply.headers["allow"]
        held(http.post(path, content=json.dumps(ask), headers={"content-type": "text/plain"}), path, "media")
        held(http.post(path, json=ask | {"user": "x" * 5000}), path, "length")
        narrow.runner.hold()
        late = http.post(path, json=ask, headers={"x-request-timeout-seconds": "0.2"})
        held(late, path, "late")
        narrow.runner.free()
        narrow.settle()


def test_a_path_names_the_model(narrow: Site) -> None:
    with httpx.Client(base_url=narrow.url) as http:
        for path in ("/predictions/other", "/models/other/invoke"):
            reply = http.post(path, json=ASK["/invocations"])
            assert reply.status_code == 404 and reply.json()["type"] == "ModelNotFoundException"
        reply = http.post("/invocations", json=ASK["/invocations"], headers={"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"})
        assert reply.status_code == 424 and "Session-Id" in reply.json()["error"]
        target = {"X-Amzn-SageMaker-Target-Model": "scripted"}
        plain = http.post("/invocations", json=ASK["/invocations"]).json()
        assert http.post("/invocations", json=ASK["/invocations"], headers=target).json() == plain


def test_full_queues(narrow: Site) -> None:
    narrow.runner.hold()
    waiting = [Wire(narrow) for _ in range(3)]
    for place, wire in enumerate(waiting, start=1):
        wire.post("/v1/completions", ASK["/v1/completions"] | {"model": "scripted"})
        eventually(lambda place=place: narrow.server.served.flights.sequences == place, PATIENCE_S)
    with httpx.Client(base_url=narrow.url, timeout=PATIENCE_S) as http:
        for path, ask in ASK.items():
            reply = http.post(path, json=ask)
            held(reply, path, "busy")
            assert reply.headers["retry-after"] == "1"
    narrow.runner.free()
    for wire in waiting:
        assert b"200 OK" in wire.read_until(b"}]")
        wire.close()
    narrow.settle()


def test_loading_and_a_wrong_key(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RN_TEST_KEY", "s3cret")
    with site(tiny, {"serving": {"api_keys": ["env:RN_TEST_KEY"]}}) as running, httpx.Client(base_url=running.url) as http:
        for path, ask in ASK.items():
            if path != "/":
                held(http.post(path, json=ask), path, "key")
        theirs = {"x-api-key": "s3cret", "anthropic-version": "2023-06-01"}
        assert http.post("/v1/messages", json=ASK["/v1/messages"], headers=theirs).status_code == 200
        served = running.server.served
        shut = Shut("weights 3/30", served.limits)
        assert isinstance(shut.refusal, NotReady)
        monkeypatch.setattr(running.server, "now", shut)
        for path, ask in ASK.items():
            reply = http.post(path, json=ask, headers={"authorization": "Bearer s3cret"})
            assert "weights 3/30" in held(reply, path, "loading") and reply.headers["retry-after"] == "1"


def test_a_step_that_fails(tiny: Path) -> None:
    for path in ("/v1/responses", "/v1/messages", "/generate_stream", "/invocations"):
        with site(tiny) as running, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:

            def fail(*_: Any) -> int:
                raise RuntimeError("secret")

            running.runner.token = fail  # type: ignore[method-assign]
            reply = http.post(path, json=ASK[path])
            assert "secret" not in held(reply, path, "broken")


WHOLE: dict[str, Callable[[Any], str]] = {
    "/v1/chat/completions": lambda reply: reply["choices"][0]["message"]["content"],
    "/v1/completions": lambda reply: reply["choices"][0]["text"],
    "/v1/responses": lambda reply: reply["output"][0]["content"][0]["text"],
    "/v1/messages": lambda reply: reply["content"][0]["text"],
    "/generate": lambda reply: reply["text"],
    "/": lambda reply: reply[0]["generated_text"],
    "/invocations": lambda reply: reply["generated_text"],
    "/predictions/scripted": lambda reply: reply["generated_text"],
    "/models/scripted/invoke": lambda reply: reply["generated_text"],
}


def streamed(path: str, raw: str) -> str:
    """The text of a stream, as its readers join it."""
    if SPEAKS[path] == LMI:
        return "".join(json.loads(line)["token"]["text"] for line in raw.splitlines())
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    if SPEAKS[path] == TGI:
        return "".join(event["token"]["text"] for event in events)
    if SPEAKS[path] == ANTHROPIC:
        return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    if path == "/v1/responses":
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    texts = [choice.get("text") or choice.get("delta", {}).get("content", "") for event in events for choice in event.get("choices", [])]
    return "".join(texts) or "".join(event.get("text", "") for event in events)


@pytest.mark.parametrize("path", ASK)
def test_a_call_whole_and_streamed(narrow: Site, path: str) -> None:
    kinds = {LMI: "application/jsonlines"}
    with httpx.Client(base_url=narrow.url, timeout=PATIENCE_S) as http:
        reply = http.post(path, json=ASK[path] | {"stream": True})
        assert reply.status_code == 200 and reply.headers["content-type"] == kinds.get(SPEAKS[path], "text/event-stream")
        text = streamed(path, reply.text)
        assert len(text) == 4 and ("[DONE]" in reply.text) == (SPEAKS[path] == OPENAI and path != "/v1/responses")
        if path in WHOLE:
            assert WHOLE[path](http.post(path, json=ASK[path]).json()) == text
        narrow.settle()


def test_what_stands_beside_generation(narrow: Site) -> None:
    with httpx.Client(base_url=narrow.url, timeout=PATIENCE_S) as http:
        info = http.get("/info").json()
        assert (info["model_id"], info["max_total_tokens"], info["router"]) == ("scripted", 256, "rayneuron")
        tokens = http.post("/tokenize", json={"inputs": "hello"}).json()
        assert [token["id"] for token in tokens] == http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
        chat = http.post("/chat_tokenize", json={"messages": USER}).json()
        counted = http.post("/v1/messages/count_tokens", json={"messages": USER}).json()["input_tokens"]
        assert len(chat["tokenize_response"]) == counted
        assert http.post("/v1/messages", json=ASK["/v1/messages"]).json()["usage"] == {"input_tokens": counted, "output_tokens": 4}
        assert http.get("/models").json()["models"][0]["modelName"] == "scripted"
        assert http.get("/models/scripted").json()[0]["modelName"] == "scripted"
        assert http.get("/models/other").json()["type"] == "ModelNotFoundException"
        for method, path in (("POST", "/models"), ("DELETE", "/models/scripted"), ("PUT", "/models/scripted")):
            reply = http.request(method, path)
            assert reply.status_code == reply.json()["code"] == 400 and "the deployment file says" in reply.json()["message"]
        assert http.get("/v1/responses/resp_1").status_code == 404 and http.post("/v1/responses/resp_1/cancel").status_code == 404
        by_key = ASK["/v1/chat/completions"], ASK["/v1/completions"]
        assert [http.post("/invocations", json=body).json()["object"] for body in by_key] == ["chat.completion", "text_completion"]
        wrong = http.post("/invocations", json=by_key[0] | {"temperature": "x"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"  # a body of OpenAI's: its errors
        tgi = http.post("/generate", json=ASK["/"])
        assert tgi.json() == http.post("/", json=ASK["/"]).json()[0]
        assert http.post("/generate", json={"inputs": "x", "parameters": {"top_k": 0}}).json()["error_type"] == "validation"
