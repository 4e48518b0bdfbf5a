"""Clients that users have, unchanged: OpenAI's Responses with strict validation, and huggingface_hub's text generation."""

from __future__ import annotations

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from tests.serve.scripted import Site

openai = pytest.importorskip("openai")


def test_responses(scripted_site: Site) -> None:
    client = openai.OpenAI(base_url=f"{scripted_site.url}/v1", api_key="none", _strict_response_validation=True, max_retries=0)
    words = {"model": "scripted", "input": "hello", "instructions": "be brief", "max_output_tokens": 6}
    whole = client.responses.create(**words)  # type: ignore[call-overload]
    assert (whole.status, whole.usage.output_tokens, len(whole.output_text)) == ("incomplete", 6, 6)
    with client.responses.stream(**words) as stream:  # type: ignore[arg-type]
        events = list(stream)
    final = events[-1].response  # get_final_response() knows no other end than completed
    assert events[-1].type == "response.incomplete" and final.output_text == whole.output_text and final.usage == whole.usage
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.create(**words, previous_response_id="resp_1")  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_huggingface_hub(scripted_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)  # loopback is no hub
    client = InferenceClient(scripted_site.url)
    text = client.text_generation("hello", max_new_tokens=6)
    assert len(text) == 6
    told = client.text_generation("hello", max_new_tokens=6, details=True)
    assert told.generated_text == text and [token.text for token in told.details.tokens] == list(text)
    assert (told.details.finish_reason, told.details.generated_tokens) == ("length", 6)
    assert "".join(client.text_generation("hello", max_new_tokens=6, stream=True)) == text
    last = list(client.text_generation("hello", max_new_tokens=6, stream=True, details=True))[-1]
    assert (last.generated_text, last.details.generated_tokens) == (text, 6)
    with pytest.raises(ValidationError, match="parameters.top_p must be between 0 and 1"):  # its own class, by `error_type`
        client.text_generation("hello", top_p=5.0)
