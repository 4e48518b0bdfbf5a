"""Constrained calls over the whole server: texts that match in every dialect, errors before any header, neighbours' texts unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rayneuron import metrics
from tests.serve.real import beside, serving

PATTERN = "[a-f]{3,9}-[0-9]{2}"
USER = [{"role": "user", "content": "hello"}]
TEMPLATE = "{{ messages[0].content }}"
GRAMMAR = {"type": "json", "value": {"enum": ["one", 2, None]}}
FORMAT = {"type": "json_schema", "name": "n", "schema": GRAMMAR["value"]}
BARE = {"type": "json_schema", "schema": GRAMMAR["value"]}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "n", "schema": GRAMMAR["value"]}}


def text_of(path: str, reply: dict[str, Any]) -> str:
    """Where each dialect has it."""
    if path == "/v1/responses":
        return str(reply["output"][-1]["content"][0]["text"])
    if path == "/v1/messages":
        return str(reply["content"][0]["text"])
    choice = reply["choices"][0] if "choices" in reply else reply
    return str(choice.get("text") or choice.get("generated_text") or choice["message"]["content"])


CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "x", "guided_regex": PATTERN, "max_tokens": 40}, PATTERN),
    ("/v1/chat/completions", {"messages": USER, "response_format": WRAPPED, "max_tokens": 40}, '"one"|2|null'),
    ("/v1/responses", {"input": "x", "text": {"format": FORMAT}, "max_output_tokens": 40}, '"one"|2|null'),
    ("/v1/messages", {"messages": USER, "output_format": BARE, "max_tokens": 40}, '"one"|2|null'),
    ("/generate_stream", {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "("}}}, ""),
    ("/invocations", {"inputs": "x", "parameters": {"grammar": GRAMMAR, "max_new_tokens": 40}}, '"one"|2|null'),
]


async def test_texts_match_and_errors_come_before_headers(tiny: Path) -> None:
    async with serving(tiny, model={"path": str(tiny), "name": "tiny", "chat_template": TEMPLATE}, max_model_len=256) as server:
        async with beside(server) as rounds:
            for path, body, pattern in CALLS:
                status, reply = await server.post(path, json.dumps(body).encode())
                assert (status == 200) == bool(pattern), (path, reply)
                if pattern:
                    assert re.fullmatch(pattern, text_of(path, json.loads(reply))), (path, reply)
            bad = [
                ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strange"}}}),
                ("structured_outputs", {"grammar": "start: nowhere"}),
                ("structured_outputs", {"json": "{"}),
                ("structured_outputs", {"grammar": "x ::= y"}),
                ("guided_grammar", "root ::= ["),
                ("structured_outputs", {"json": {"enum": ["x" * 200_000]}}),
                ("guided_regex", "("),
            ]
            for field, said in bad:
                for more in ({}, {"stream": True}, {"stream": True, "n": 3}, {"prompt": ["a", "b"], "stream": True}):
                    status, reply = await server.post("/v1/completions", json.dumps({"prompt": "x", field: said, **more}).encode())
                    assert status == 400 and json.loads(reply)["error"]["param"] == field, reply
            for number in (10**30, -(2**63) - 1):  # more than a message between processes can hold
                tag = {"type": "structural_tag", "triggers": number}
                for field, said in (("response_format", tag), ("guided_json", {"const": number})):
                    status, reply = await server.post("/v1/completions", json.dumps({"prompt": "x", field: said}).encode())
                    assert status == 400 and json.loads(reply)["error"]["param"] == field, reply
            assert min(rounds) >= 0
        await server.settle()
        server.server.telemetry.refresh()
        series = server.server.telemetry.series
        assert series[metrics.GRAMMAR_ERRORS].values == {("refused",): len(bad) + 1, ("ended",): 0}  # each once: it is kept
        assert all(0 < series[metric].values[()] < 60 for metric in (metrics.GRAMMAR_MASK, metrics.GRAMMAR_COMPILE))


async def test_a_handle_may_constrain(tiny: Path) -> None:
    async with serving(tiny, max_model_len=256) as server:
        said = {"structured_outputs": {"regex": PATTERN}, "max_tokens": 40, "temperature": 1.0, "seed": 3}
        pieces = [piece async for piece in server.server.generate("x", said)]
        assert re.fullmatch(PATTERN, "".join(piece["text"] for piece in pieces))
        body = {"prompt": "x", "structured_outputs": {"choice": ["left", "right"]}, "max_tokens": 20}
        assert (await server.server.completions(body))["choices"][0]["text"] in ("left", "right")
        await server.settle()
