"""Calls as vLLM's own parsers read them out of the same texts; where the two differ is listed.

RAYNEURON_VLLM=V/bin/python pytest -m clients tests/clients/test_vllm_parsers.py, with vLLM in V.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rayneuron.api.scan import Scan, Scanner

PYTHON = os.environ.get("RAYNEURON_VLLM", "")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(300), pytest.mark.skipif(not PYTHON, reason="RAYNEURON_VLLM names no python")]
PROGRAM = Path(__file__).with_name("vllm_parsers.py")
VALUES: list[Any] = [1, -2.5, True, None, "x", 'a "quoted" }{][ word', "back\\slash", "水 😀", "", "it's"]
VALUES += [[], {}, [1, [2, {"k": "v"}]], {"a": {"b": [None]}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BROKEN = "<tool_call>no</tool_call>"
# Text, what vLLM makes of it, what we do: (calls, content) of each. vLLM lets all calls go for one that is broken, and what is behind them.
DIFFERENT: list[tuple[str, str, tuple[Any, Any], tuple[Any, Any]]] = [
    ("hermes", CALL + " done", ([["f", {"a": 1}]], None), ([["f", {"a": 1}]], "done")),
    ("hermes", CALL + BROKEN, ([], CALL + BROKEN), ([["f", {"a": 1}]], BROKEN)),
    ("llama3_json", 'So {"name": "f", "parameters": {}}', ([["f", {}]], None), ([], 'So {"name": "f", "parameters": {}}')),
]


def texts() -> list[tuple[str, str]]:
    """Well-formed answers of each form: none, one or several calls, with and without words before them."""
    rng = random.Random(4)
    made: list[tuple[str, str]] = []
    for _ in range(70):
        many, keys = range(rng.randrange(1, 4)), rng.sample("abc", rng.randrange(4))
        calls = [(rng.choice("fgh"), {key: rng.choice(VALUES) for key in keys}) for _ in many]
        space = rng.choice(["", "\n", " "])
        wrapped = [json.dumps({"name": n, "arguments": a}, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])) for n, a in calls]
        before = rng.choice(["", "I ask.\n", "a < b "])
        made.append(("hermes", before + "\n".join(f"<tool_call>{space}{each}{space}</tool_call>" for each in wrapped)))
        written = [json.dumps({"name": n, "parameters": a}, ensure_ascii=rng.random() < 0.5) for n, a in calls]
        made.append(("llama3_json", rng.choice(["", "<|python_tag|>"]) + "; ".join(written)))
        spelled = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
        made.append(("pythonic", "[" + ", ".join(spelled) + "]"))
    plain = ["Hello.", '{"a": 1}', "<tool_call>no</tool_call>", "[1, 2]", "[link](x)", ""]
    return made + [(form, text) for form in ("hermes", "llama3_json", "pythonic") for text in plain]


def ours(form: str, text: str) -> tuple[Any, Any]:
    calls: list[Any] = []
    content = ""
    for event in Scanner(Scan(form)).push(text, last=True):
        if event.kind == "call":
            calls.append([event.name, ""])
        elif event.kind == "arguments":
            calls[-1][1] += event.text
        else:
            content += event.text
    return [[name, json.loads(arguments)] for name, arguments in calls], content or None


def test_they_read_the_same_calls() -> None:
    asked = texts() + [(form, text) for form, text, _, _ in DIFFERENT]
    assert len(asked) > 200
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "VLLM_LOGGING_LEVEL": "CRITICAL"}
    done = subprocess.run([PYTHON, str(PROGRAM)], input=json.dumps(asked), capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = [
        ([[name, json.loads(arguments)] for name, arguments in calls], content or None)
        for calls, content in json.loads(done.stdout.splitlines()[-1])
    ]
    same = len(texts())
    wrong = [(text, told, ours(form, text)) for (form, text), told in zip(asked[:same], theirs, strict=False) if told != ours(form, text)]
    assert not wrong, wrong[:5]
    for (form, text, their, our), told in zip(DIFFERENT, theirs[same:], strict=True):
        assert (told, ours(form, text)) == (their, our)
