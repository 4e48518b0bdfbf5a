"""Calls of tools through the whole server: forced ones have the form of their tool, and the SDK reads stream and reply alike."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI

from tests.serve.real import Server, serving

TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content or '' }} {% endfor %}"
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": False, "$defs": {"city": {"enum": ["Paris", "Rome"]}}}  # fmt: skip
COLOUR = {"type": "object", "properties": {"rgb": {"type": "array", "items": {"enum": [0, 255]}, "minItems": 3, "maxItems": 3}},
          "required": ["rgb"], "additionalProperties": False}  # fmt: skip
SCHEMAS = {"weather": CITY, "colour": COLOUR, "now": {"type": "object", "properties": {}, "additionalProperties": False}}


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: Any = [tool(name, schema) for name, schema in SCHEMAS.items()]
USER: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def server(tiny: Path) -> AsyncIterator[Server]:
    model = {"path": str(tiny), "name": "tiny", "chat_template": TEMPLATE}
    async with serving(tiny, model=model, max_model_len=256, serving={"tool_call_parser": "hermes"}) as made:
        yield made


def client(server: Server) -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app))
    return AsyncOpenAI(base_url="http://rayneuron/v1", api_key="none", http_client=http, max_retries=0)


def check(calls: Any, among: set[str]) -> None:
    assert calls and len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.function.name in among
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", "weather", "colour"])
async def test_a_forced_call_has_the_form_of_its_tool(server: Server, choice: str, seed: int) -> None:
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    ask: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": named, "max_tokens": 150, "seed": seed, "temperature": 1}
    ask |= {"parallel_tool_calls": False}
    reply = await client(server).chat.completions.create(**ask)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls" and message.content is None
    check(message.tool_calls, set(SCHEMAS) if choice == "required" else {choice})
    async with client(server).chat.completions.stream(**ask) as stream:
        final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == "tool_calls" and not final.message.content
    told = [(call.function.name, call.function.arguments) for call in final.message.tool_calls or ()]
    assert told == [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    await server.settle()


async def test_what_is_wrong_is_named(server: Server) -> None:
    for body, param in (
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[3]"),
        ({"tools": [tool("x", {"type": "odd"})], "tool_choice": "required"}, "tool_choice"),
    ):
        status, reply = await server.post("/v1/chat/completions", json.dumps({"messages": USER, **body}).encode())
        assert (status, json.loads(reply)["error"]["param"]) == (400, param), reply
    await server.settle()
