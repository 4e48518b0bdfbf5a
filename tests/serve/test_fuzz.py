"""Every field of every request, wrong in every way, while healthy streams run: 4xx for the bad, the same bytes for the good, no 5xx."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.scripted import PATIENCE_S, Site, site

STREAMS = 8
# Values that are of the wrong kind, out of range, or hostile for some field or other.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, "", "x", "1", "auto", "none", "json",
    "\u0000", "\ud7ff", "🙂" * 50, "a" * 5000, [], [[]], [None], [1], [-1], [2**70], ["x"], [""], [[1], [2]], [["x"]], ["x", 1], [True],
    {}, {"a": 1}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"include_usage": 1}, {"1": 5}, {"x": 5}, {"-1": 200},
    {"9": "x"}, [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": 1, "content": "x"}], [{}], [{"type": "function"}],
    [{"type": "function", "function": {"name": ""}}], {"type": "function", "function": {"name": "f"}}, [[[[[[]]]]]],
)  # fmt: skip
SAMPLING = (
    "model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "n", "best_of", "seed", "stop", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids", "logit_bias",
    "logprobs", "prompt_logprobs", "stream", "stream_options", "response_format", "structured_outputs", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids", "priority",
    "request_id", "session_id", "stream_interval", "user", "cache_salt", "kv_transfer_params", "truncate_prompt_tokens", "truncation_side",
    "add_special_tokens", "no_repeat_ngram_size", "something_unknown",
)  # fmt: skip
FIELDS = {
    "/v1/completions": (*SAMPLING, "prompt", "echo", "suffix", "use_beam_search", "prompt_embeds"),
    "/v1/chat/completions": (
        *SAMPLING, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "chat_template",
        "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents", "reasoning_effort",
    ),
    "/generate": (*SAMPLING, "prompt", "messages", "inputs", "parameters"),
    "/tokenize": ("model", "prompt", "messages", "add_special_tokens", "return_token_strs", "add_generation_prompt", "chat_template"),
    "/detokenize": ("model", "tokens"),
}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "go", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "go"}], "max_tokens": 1},
    "/generate": {"prompt": "go", "max_tokens": 1},
    "/tokenize": {"prompt": "go"},
    "/detokenize": {"tokens": [9, 10]},
}
HEADERS = ("x-request-id", "x-request-timeout-seconds", "authorization", "content-type", "accept", "x-session-id")


@pytest.fixture(scope="module")
def fuzzed(tiny: Path) -> Iterator[Site]:
    with site(tiny, rows=16, length=256, pace_s=0.002) as running:
        yield running


class Healthy:
    """Streams that run beside the fuzz, over and over; every answer must be the same bytes as the first one."""

    def __init__(self, site: Site) -> None:
        self._url = site.url
        self._stop = threading.Event()
        self.rounds = [0] * STREAMS
        self.wrong: list[str] = []
        self._expected = [self._ask(number) for number in range(STREAMS)]
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(STREAMS)]

    def __enter__(self) -> Healthy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert all(self.rounds)

    def _run(self, number: int) -> None:
        while not (self.rounds[number] and self._stop.is_set()):  # once at least, however quick the fuzz is
            got = self._ask(number)
            self.rounds[number] += 1
            if got != self._expected[number]:
                self.wrong.append(f"{number}: {got!r} instead of {self._expected[number]!r}")

    def _ask(self, number: int) -> bytes:
        """The text of one stream, whatever the chunks; everything else of it compared as it is."""
        body = {"prompt": f"stream {number}", "max_tokens": 60, "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
        reply = httpx.post(f"{self._url}/v1/completions", json=body, timeout=PATIENCE_S, headers={"x-request-id": f"healthy-{number}"})
        events = [line.removeprefix("data: ") for line in reply.text.split("\n") if line]
        assert reply.status_code == 200 and events[-1] == "[DONE]", reply.text
        chunks = [json.loads(event) for event in events[:-1]]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        return json.dumps([text, ends, chunks[-1]["usage"], {chunk["id"] for chunk in chunks} == {f"cmpl-healthy-{number}"}]).encode()


class Client:
    """Kept-alive connections, one a thread; the standard library's, which costs least."""

    def __init__(self, site: Site) -> None:
        self._port = site.port
        self._local = threading.local()

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, str, bytes]:
        """Status, content type and body of the reply."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        connection.request("POST", path, body, {"content-type": "application/json", **(headers or {})})
        reply = connection.getresponse()
        return reply.status, reply.getheader("content-type", ""), reply.read()

    def map(self, asked: list[tuple[str, bytes, dict[str, str]]]) -> list[int]:
        """Every call checked, eight at a time; the statuses."""
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda one: self.check(*one), asked))

    def check(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        """200, or a 4xx with an error object whose message says something."""
        status, kind, reply = self.post(path, body, headers)
        assert status < 500, (status, reply, path, body, headers)
        if kind.startswith("text/event-stream"):
            assert status == 200 and reply.endswith(b"data: [DONE]\n\n") and b'"error"' not in reply, (reply, body)
        elif status == 200:
            json.loads(reply)
        else:
            error = json.loads(reply)["error"]
            if isinstance(error, str):  # TGI's form: where a body has `inputs`
                error = {"message": error, "code": status if json.loads(reply)["error_type"] else None}
            assert error["message"] and error["code"] == status, (reply, body)
        return status


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_with_every_wrong_value(fuzzed: Site, path: str) -> None:
    asked = [(path, json.dumps(GOOD[path] | {field: value}).encode(), {}) for field in FIELDS[path] for value in VALUES]
    with Healthy(fuzzed) as healthy:
        statuses = Client(fuzzed).map(asked)
    assert not healthy.wrong
    assert sum(status != 200 for status in statuses) > 10 * len(FIELDS[path])  # the values do bite
    fuzzed.settle()


def test_bodies_torn_and_turned(fuzzed: Site) -> None:
    """Random bytes changed, cut and repeated in valid bodies; random values in several fields at once; odd headers."""
    draw = random.Random(7)
    asked = []
    for _ in range(1000):
        path = draw.choice(tuple(FIELDS))
        body = bytearray(json.dumps(GOOD[path] | {field: draw.choice(VALUES) for field in draw.sample(FIELDS[path], 2)}).encode())
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(body))
            body[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        headers = {}
        if draw.random() < 0.3:
            headers[draw.choice(HEADERS)] = draw.choice(("", "x", "-1", "1e400", "nan", "0", "a" * 3000, "*/*", "Bearer x"))
        asked.append((path, bytes(body), headers))
    with Healthy(fuzzed) as healthy:
        Client(fuzzed).map(asked)
    assert not healthy.wrong
    fuzzed.settle()


def test_the_error_names_the_field(fuzzed: Site) -> None:
    with httpx.Client(base_url=fuzzed.url, timeout=PATIENCE_S) as client:
        for field, value in {
            "temperature": "hot", "top_p": 0, "top_k": -5, "min_p": 2, "n": 0, "seed": "x", "stop": [""], "max_tokens": -3,
            "logit_bias": {"x": 1}, "stop_token_ids": ["a"], "presence_penalty": 3, "repetition_penalty": 0, "logprobs": 99,
            "stream_options": {"include_usage": True}, "allowed_token_ids": [], "min_tokens": -1, "prompt": {"a": 1},
        }.items():  # fmt: skip
            reply = client.post("/v1/completions", json=GOOD["/v1/completions"] | {field: value})
            assert reply.status_code == 400, (field, reply.text)
            assert re.match(rf"{field}\b", reply.json()["error"]["param"]), (field, reply.text)
