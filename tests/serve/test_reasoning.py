"""Reasoning through the whole server: a budget forces its end and changes nothing before, its tokens are counted, forms begin behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayneuron.text.text import Text
from tests.serve.real import Server, serving

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "return_token_ids": True, "ignore_eos": True}


async def ask(server: Server, **more: Any) -> dict[str, Any]:
    status, reply = await server.post("/v1/chat/completions", json.dumps({**ASK, **more}).encode())
    assert status == 200, reply
    return json.loads(reply)


def model(tiny: Path, template: str) -> dict[str, Any]:
    return {"path": str(tiny), "name": "tiny", "chat_template": template}


@pytest.mark.parametrize(("parser", "template"), [("deepseek_r1", PLAIN), ("qwen3", PLAIN + "<think>")])
@pytest.mark.parametrize("how", [{"temperature": 0}, {"seed": 3, "temperature": 1.0, "top_p": 0.9}], ids=["greedy", "drawn"])
async def test_a_budget_forces_the_end_of_reasoning(tiny: Path, parser: str, template: str, how: dict[str, Any]) -> None:
    text = Text(tiny)
    marker = text.encode("</think>", False)
    async with serving(tiny, model=model(tiny, template), max_model_len=128, serving={"reasoning_parser": parser}) as server:
        free = (await ask(server, **how))["choices"][0]
        assert free["message"]["content"] is None and free["message"]["reasoning"] == free["message"]["reasoning_content"]
        for budget in (0, 1, 6, 90):
            told = await ask(server, thinking_token_budget=budget, **how)
            choice, ids = told["choices"][0], told["choices"][0]["token_ids"]
            kept = min(budget, 40)
            assert ids[:kept] == free["token_ids"][:kept] and ids[kept : kept + len(marker)] == marker[: 40 - kept]
            assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == kept
            assert choice["message"].get("reasoning", "") == text.decode(ids[:kept])
            assert (choice["message"]["content"] or "") == (text.decode(ids[kept + len(marker) :]) if kept < 40 else "")
        body = {**ASK, "thinking_token_budget": 6, "stream": True, **how}
        status, reply = await server.post("/v1/chat/completions", json.dumps(body).encode())
        chunks = [json.loads(line[6:]) for line in reply.decode().splitlines() if line.startswith("data: {")]
        streamed = "".join(c["delta"].get("reasoning_content", "") for chunk in chunks for c in chunk["choices"])
        assert streamed == text.decode(free["token_ids"][:6])
        await server.settle()


async def test_a_form_begins_behind_reasoning(tiny: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    async with serving(tiny, model=model(tiny, PLAIN), max_model_len=256, serving={"reasoning_parser": "deepseek_r1"}) as server:
        for seed in range(3):
            told = await ask(server, response_format=form, thinking_token_budget=5, max_tokens=120, seed=seed, ignore_eos=False)
            assert json.loads(told["choices"][0]["message"]["content"])["a"] in ("x", "y")
            assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
        body = {"model": "tiny", "max_tokens": 30, "messages": ASK["messages"], "thinking": {"type": "enabled", "budget_tokens": 4}}
        status, reply = await server.post("/v1/messages", json.dumps(body | {"temperature": 0}).encode())
        assert status == 200 and [block["type"] for block in json.loads(reply)["content"]][0] == "thinking"
        body = {"input": "hello", "max_output_tokens": 20, "temperature": 0}
        status, reply = await server.post("/v1/responses", json.dumps(body).encode())
        response = json.loads(reply)
        assert [item["type"] for item in response["output"]] == ["reasoning"]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 20
        await server.settle()


async def test_who_does_not_reason_is_left_alone(tiny: Path) -> None:
    """A model that may think and does not, with a budget and without; and a server that does not tell reasoning apart."""
    async with serving(tiny, model=model(tiny, PLAIN), max_model_len=128, serving={"reasoning_parser": "qwen3"}) as server:
        free, told = await ask(server, temperature=0), await ask(server, temperature=0, thinking_token_budget=3)
        assert free["choices"][0]["token_ids"] == told["choices"][0]["token_ids"]
        assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
        await server.settle()
    async with serving(tiny, model=model(tiny, PLAIN), max_model_len=128) as server:
        status, reply = await server.post("/v1/chat/completions", json.dumps({**ASK, "thinking_token_budget": 3}).encode())
        assert (status, json.loads(reply)["error"]["param"]) == (400, "thinking_token_budget")
        assert "completion_tokens_details" not in (await ask(server))["usage"]
        await server.settle()
