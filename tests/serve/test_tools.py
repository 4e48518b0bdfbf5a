"""Calls of tools through the whole server: forced ones have the form of their tool, and the SDK reads stream and reply alike."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI

from rayneuron import metrics
from rayneuron.errors import ConfigError
from tests.serve.real import Server, serving

TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content or '' }} {% endfor %}"
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
                                             "metric": {"type": "boolean"}},
        "required": ["city", "days"], "additionalProperties": False, "$defs": {"city": {"enum": ["Paris", "Rome"]}}}  # fmt: skip
COLOUR = {"type": "object", "properties": {"rgb": {"type": "array", "items": {"enum": [0, 255]}, "minItems": 3, "maxItems": 3}},
          "required": ["rgb"], "additionalProperties": False}  # fmt: skip
SCHEMAS = {"weather": CITY, "colour": COLOUR, "now": {"type": "object", "properties": {}, "additionalProperties": False}}


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: Any = [tool(name, schema) for name, schema in SCHEMAS.items()]
USER: Any = [{"role": "user", "content": "hello"}]


FORMS = ("hermes", "llama3_json", "mistral", "mistral by name", "pythonic")


def marked(tiny: Path, folder: Path, form: str) -> Path:
    """The model with markers of a form as special tokens, in place of two that it does not need here."""
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    named = {"<|im_start|>": "[TOOL_CALLS]", **({"<|endoftext|>": "[ARGS]"} if form == "mistral by name" else {})}
    named = {"<|im_start|>": "<tool_call>", "<|endoftext|>": "</tool_call>"} if form == "hermes" else named
    for file in folder.glob("tokenizer*.json"):
        said = file.read_text()
        for old, new in named.items():
            said = said.replace(json.dumps(old), json.dumps(new))
        file.write_text(said)
    return folder


@pytest.fixture(params=FORMS)
async def server(tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    form = request.param
    path = marked(tiny, tmp_path / "model", form) if "mistral" in form or form == "hermes" else tiny
    model = {"path": str(path), "name": "tiny", "chat_template": TEMPLATE}
    async with serving(path, model=model, max_model_len=256, serving={"tool_call_parser": form.split()[0]}) as made:
        yield made


@pytest.fixture
async def hermes(tiny: Path) -> AsyncIterator[Server]:
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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("choice", ["required", "weather", "colour"])
async def test_a_forced_call_has_the_form_of_its_tool(server: Server, choice: str, seed: int) -> None:
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    ask: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": named, "max_tokens": 150, "seed": seed, "temperature": 1}
    ask |= {"parallel_tool_calls": False}
    mistral = server.server.config.serving.tool_call_parser == "mistral"
    reply = await client(server).chat.completions.create(**ask)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls" and message.content is None
    check(message.tool_calls, set(SCHEMAS) if choice == "required" else {choice})
    assert all(re.fullmatch("[a-zA-Z0-9]{9}" if mistral else "chatcmpl-tool-.*", call.id) for call in message.tool_calls or ())
    async with client(server).chat.completions.stream(**ask) as stream:
        final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == "tool_calls" and not final.message.content
    told = [(call.function.name, call.function.arguments) for call in final.message.tool_calls or ()]
    assert told == [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    await server.settle()


async def test_several_calls(server: Server) -> None:
    """All that are whole have the form of their tools, in a stream as in a reply, and more than one comes."""
    most = seed = 0
    while most < 2:
        seed += 1
        ask: Any = {"model": "tiny", "messages": USER, "tools": TOOLS[2:], "tool_choice": "required", "max_tokens": 150, "seed": seed}
        ask |= {"extra_body": {"min_tokens": 60}}  # so that it goes on
        reply = (await client(server).chat.completions.create(**ask)).choices[0]
        told = [(call.function.name, call.function.arguments) for call in reply.message.tool_calls or ()]
        parts: dict[int, list[str]] = {}
        async for chunk in await client(server).chat.completions.create(stream=True, **ask):
            for call in chunk.choices[0].delta.tool_calls or ():
                part = parts.setdefault(call.index, ["", ""])
                part[0] += (call.function.name if call.function else "") or ""
                part[1] += (call.function.arguments if call.function else "") or ""
        assert [tuple(part) for part in parts.values()] == told
        check(reply.message.tool_calls[: len(told) - (reply.finish_reason == "length")] or reply.message.tool_calls, {"now"})
        most = max(most, len(told))
    await server.settle()


async def test_a_strict_tool_is_called_as_it_says_where_the_model_chooses_to(server: Server) -> None:
    """A call is made likely by its first token; without that there is mostly none, and the answer is text."""
    form = server.server.config.serving.tool_call_parser
    first = {"hermes": "<tool_call>", "llama3_json": "{", "mistral": "[TOOL_CALLS]", "pythonic": "["}[str(form)]
    _, found = await server.post("/tokenize", json.dumps({"prompt": first, "add_special_tokens": False}).encode())
    bias = {str(json.loads(found)["tokens"][0]): 100}
    strict: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for seed in range(3):
        ask: Any = {"model": "tiny", "messages": USER, "tools": strict, "max_tokens": 150, "seed": seed, "parallel_tool_calls": False}
        reply = (await client(server).chat.completions.create(**ask, logit_bias=bias)).choices[0]
        check(reply.message.tool_calls, set(SCHEMAS))  # whatever it says behind it
        free = (await client(server).chat.completions.create(**ask | {"max_tokens": 20})).choices[0]
        assert free.message.content or free.message.tool_calls
    await server.settle()


async def test_what_is_wrong_is_named(hermes: Server) -> None:
    for body, param in (
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[3]"),
        ({"tools": [tool("x", {"type": "odd"})], "tool_choice": "required"}, "tool_choice"),
    ):
        status, reply = await hermes.post("/v1/chat/completions", json.dumps({"messages": USER, **body}).encode())
        assert (status, json.loads(reply)["error"]["param"]) == (400, param), reply
    await hermes.settle()


async def test_what_cannot_be_written_as_python_is_named(tiny: Path) -> None:
    model = {"path": str(tiny), "name": "tiny", "chat_template": TEMPLATE}
    async with serving(tiny, model=model, max_model_len=256, serving={"tool_call_parser": "pythonic"}) as server:
        for schema in ({"properties": 5}, {"required": 5}, {"required": "a"}, {"required": [1]}, {"properties": {"a b": {}}}):
            for strict, choice, param in ((False, "required", "tool_choice"), (True, "auto", "tools")):
                made = tool("x", schema)
                made["function"]["strict"] = strict
                for stream in (False, True):
                    body = {"messages": USER, "tools": [made], "tool_choice": choice, "stream": stream}
                    status, reply = await server.post("/v1/chat/completions", json.dumps(body).encode())
                    assert (status, json.loads(reply)["error"]["param"]) == (400, param), (schema, reply)
        await server.settle()


@pytest.mark.parametrize(("template", "form"), [(TEMPLATE, None), (TEMPLATE + "{# [TOOL_CALLS] #}", "mistral")])
async def test_the_chat_template_tells_the_form(tiny: Path, template: str, form: str | None) -> None:
    """Where no file says it. What cannot be told is a 400 that says so, and where the file asks for it the server does not start."""
    model = {"path": str(tiny), "name": "tiny", "chat_template": template}
    async with serving(tiny, model=model, max_model_len=256) as server:
        body = {"messages": USER, "tools": TOOLS[2:], "max_tokens": 4}
        status, reply = await server.post("/v1/chat/completions", json.dumps(body).encode())
        assert status == (400 if form is None else 200)
        assert form is not None or json.loads(reply)["error"]["param"] == "tools"
        body |= {"tool_choice": "required", "max_tokens": 120, "parallel_tool_calls": False}
        told = json.loads((await server.post("/v1/chat/completions", json.dumps(body).encode()))[1])["choices"][0]["message"]["tool_calls"]
        assert told[0]["function"]["name"] == "now" and (len(told[0]["id"]) == 9) == (form == "mistral")
        await server.settle()
    if form is None:
        with pytest.raises(ConfigError, match="tool_call_parser: auto"):
            async with serving(tiny, model=model, serving={"tool_call_parser": "auto"}):
                pass


async def test_calls_are_counted(hermes: Server) -> None:
    """By what the client was told: whole where the arguments came to their end, else not; once, streamed or not."""
    wanted = {("hermes", "true"): 0, ("hermes", "false"): 0}
    series = hermes.server.telemetry.series[metrics.TOOL_CALLS]
    assert not any(series.values.values()), "from the start, as every form's zero, so that a first call is an increase"
    ask: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": "required", "temperature": 1}
    for seed in range(3):
        for most in (12, 200):
            for stream in (False, True):
                body = ask | {"seed": seed, "max_tokens": most, "stream": stream, "parallel_tool_calls": bool(seed)}
                status, reply = await hermes.post("/v1/chat/completions", json.dumps(body).encode())
                assert status == 200
                if not stream:
                    choice = json.loads(reply)["choices"][0]
                    for call in choice["message"].get("tool_calls") or ():
                        wanted["hermes", str(_whole(call["function"]["arguments"])).lower()] += 2  # streamed it is the same
    assert wanted["hermes", "true"] and {labels: count for labels, count in series.values.items() if count or labels in wanted} == wanted
    assert b'rayneuron:tool_calls_total{complete="true"' in hermes.server.telemetry.text()


def _whole(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


async def test_the_dialects_tell_the_same_call(hermes: Server) -> None:
    """Responses by its SDK, streamed and whole; Messages; LMI's route; whose errors are each one's own."""
    named: Any = {"type": "function", "function": {"name": "weather"}}
    sampling = {"seed": 5, "temperature": 1.0}
    chat = {"messages": USER, "tools": TOOLS, "tool_choice": named, "max_tokens": 150, **sampling}
    expected = []
    for path in ("/v1/chat/completions", "/invocations"):
        reply = json.loads((await hermes.post(path, json.dumps(chat).encode()))[1])
        expected.append(reply["choices"][0]["message"]["tool_calls"][0]["function"])
    assert expected[0] == expected[1] and expected[0]["name"] == "weather"
    ask: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 150, "temperature": 1.0, "extra_body": {"seed": 5}}
    ask |= {"tools": [{"type": "function", "name": name, "parameters": schema, "strict": False} for name, schema in SCHEMAS.items()]}
    ask |= {"tool_choice": {"type": "function", "name": "weather"}}
    response = await client(hermes).responses.create(**ask)
    (item,) = response.output
    assert item.type == "function_call" and {"name": item.name, "arguments": item.arguments} == expected[0]
    async with client(hermes).responses.stream(**ask) as stream:
        parts = "".join([event.delta async for event in stream if event.type == "response.function_call_arguments.delta"])
        final = await stream.get_final_response()
    assert parts == item.arguments and final.output[0].arguments == parts  # type: ignore[union-attr]
    body = {"messages": USER, "max_tokens": 150, "tool_choice": {"type": "tool", "name": "weather"}, **sampling}
    body |= {"tools": [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]}
    told = json.loads((await hermes.post("/v1/messages", json.dumps(body).encode()))[1])
    assert told["stop_reason"] == "tool_use" and told["content"][0]["input"] == json.loads(expected[0]["arguments"])
    prompt = {name: body[name] for name in ("messages", "tools")}
    counted = json.loads((await hermes.post("/v1/messages/count_tokens", json.dumps(prompt).encode()))[1])
    assert counted["input_tokens"] == told["usage"]["input_tokens"]
    shown = {"messages": USER, "tools": TOOLS}
    tokens = json.loads((await hermes.post("/chat_tokenize", json.dumps(shown).encode()))[1])["tokenize_response"]
    assert len(tokens) == told["usage"]["input_tokens"]
    wrong = {"messages": USER, "max_tokens": 9, "tools": [{"name": "f", "type": "odd"}]}
    for path, code, said in (
        ("/v1/messages", 400, {"type": "error", "error": {"type": "invalid_request_error"}}),
        ("/v1/responses", 400, {"error": {"type": "BadRequestError", "param": "tools[0].type"}}),
        ("/invocations", 400, {"error": {"param": "tools[0]"}}),  # a chat there is OpenAI's
        ("/chat_tokenize", 422, {"error_type": "validation"}),
    ):
        given = {"input": "a", "tools": wrong["tools"]} if "responses" in path else wrong
        status, reply = await hermes.post(path, json.dumps(given).encode())
        assert status == code and holds(json.loads(reply), said), (path, reply)
    await hermes.settle()


def holds(whole: Any, part: Any) -> bool:
    return all(holds(whole[name], each) for name, each in part.items()) if isinstance(part, dict) else bool(whole == part)
