"""The official client, as strict as it can be: `_strict_response_validation` raises on any reply that does not fit its schema."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.scripted import PATIENCE_S, Site, eventually, site
from tests.serve.wire import Wire

openai = pytest.importorskip("openai")

ASK: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}


@pytest.fixture(scope="module")
def client(scripted_site: Site) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own dependencies' deprecations
        with openai.OpenAI(base_url=f"{scripted_site.url}/v1", api_key="-", max_retries=0, _strict_response_validation=True) as made:
            yield made


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").max_model_len == 256


def test_chat(client: Any) -> None:
    reply = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2, n=2, temperature=0.9, seed=3)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].finish_reason == "length" and len(reply.choices[0].logprobs.content) == 6
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12
    assert reply._request_id


def test_chat_stream(client: Any) -> None:
    whole = client.chat.completions.create(**ASK, temperature=0)
    chunks = list(client.chat.completions.create(**ASK, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    with client.chat.completions.stream(**ASK, temperature=0, stop=said[-1]) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.content == said[: said.index(said[-1])] and final.finish_reason == "stop"


def test_completion_with_logprobs(client: Any) -> None:
    reply = client.completions.create(model="scripted", prompt="say:hello", max_tokens=20, logprobs=3, temperature=0)
    assert reply.choices[0].text == "hello" and reply.choices[0].finish_reason == "stop"
    assert len(reply.choices[0].logprobs.tokens) == reply.usage.completion_tokens


def test_completion_stream(scripted_site: Site) -> None:
    """Not strict: OpenAI's own types do not allow a completion chunk without a finish reason."""
    with openai.OpenAI(base_url=f"{scripted_site.url}/v1", api_key="-", max_retries=0) as client:
        chunks = list(client.completions.create(model="scripted", prompt="say:hello", max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"model": "gpt-5"}, "NotFoundError", "model"),
        ({"temperature": 7}, "BadRequestError", "temperature"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"max_tokens": 100_000}, "BadRequestError", "max_tokens"),
    ],
)
def test_errors_are_its_own_classes(client: Any, change: dict[str, Any], kind: str, param: str) -> None:
    with pytest.raises(getattr(openai, kind)) as caught:
        client.chat.completions.create(**ASK | change)
    assert caught.value.param == param and caught.value.code == str(caught.value.status_code) and caught.value.request_id


def test_it_retries_a_full_queue_and_gets_through(tiny: Path) -> None:
    """The default client: 429 with Retry-After is tried again, and works once there is room."""
    with site(tiny, {"limits": {"max_waiting": 0, "retry_after_s": 0.5}}, rows=1) as running:
        running.runner.hold()
        holder = Wire(running)
        holder.post("/v1/completions", {"model": "scripted", "prompt": "go", "max_tokens": 5})
        eventually(lambda: running.server.served.engine.snapshot().running == 1, PATIENCE_S, running.idle)
        answers: list[int] = []

        def make_room(response: httpx.Response) -> None:
            """Frees the row on the first refusal, so that the client is always refused once, however slow the machine."""
            answers.append(response.status_code)
            if response.status_code == 429:
                running.runner.free()
                eventually(lambda: not running.server.served.flights.sequences, PATIENCE_S, running.idle)

        with (
            httpx.Client(event_hooks={"response": [make_room]}) as transport,
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", http_client=transport) as client,
        ):
            assert client.completions.create(model="scripted", prompt="say:ok", max_tokens=9).choices[0].text == "ok"
        assert answers == [429, 200]
        assert running.server.telemetry.series[_rejections()].values[("capacity",)] == 1
        holder.close()


def _rejections() -> Any:
    from rayneuron import metrics

    return metrics.REJECTIONS


def test_an_error_in_a_stream_is_raised(tiny: Path) -> None:
    with site(tiny) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="engine has stopped"):
            list(client.completions.create(model="scripted", prompt="boom:3:", max_tokens=9, stream=True))
