"""Boundary values of every field, through the real engine: never a 5xx, never a dead engine, the healthy streams' text to the letter."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.serve.real import HEALTHY, Server, beside, serving
from tests.serve.test_fuzz import SAMPLING

SHORT, LONG = 600, 100_002  # requests: of one run, of all
CLIENTS = 8
ENGINES: dict[str, dict[str, Any]] = {"sync": {}, "async": {"compile": {"async_mode": True}}, "group": {"tensor_parallel": 2, "threads": 1}}
SMALL = {"max_model_len": 128, "max_num_seqs": 24, "prefill_chunk_tokens": 32}

EDGES = tuple(sign * 2**bits + step for bits in (31, 32, 63, 64) for sign in (1, -1) for step in (-1, 0, 1))
WHOLE = (0, 1, -1, 2, 5, 20, 21, 64, 65, 127, 128, 129, 2**15, 10**400, *EDGES)
REAL = (0, -0.0, 5e-324, 1e-300, 1e-9, 0.01, 0.5, 1, 1.0000001, 2, 2.0000001, -2, -2.01, 100, 1e38, 3.5e38, 1.7e308, -1.7e308)
FLAGS = (True, False)
IDS = (
    [], [0], [511], [512], [-1], [2**31], [2**63], [10**400], [7] * 600, list(range(512)), [*range(511), 600], [1.0], [None], [[1]], ["1"],
)  # fmt: skip
TEXTS = ("", "a", " ", "\n", "\u0000", "水", "\ud7ff", "👩‍👩‍👧‍👦", "e", "ab" * 100, "x" * 5000, "\u0301" * 50)
LISTS = (
    [], [""], ["a"], ["a", "b", "c", "d"], ["a"] * 129, ["e", "t", "a"], [" "], ["ab" * 99], ["x", 1], [[]], [f"w{i}" for i in range(1001)],
)  # fmt: skip
ODD = (None, {}, [], "x", [None], [[[]]], {"a": 1}, True)
KINDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "no_repeat_ngram_size", "logprobs"), WHOLE),
    **dict.fromkeys(("prompt_logprobs", "top_logprobs", "priority", "truncate_prompt_tokens", "stream_interval", "best_of"), WHOLE),
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), REAL),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "banned_token_ids", "tokens"), IDS),
    **dict.fromkeys(("stop", "bad_words"), (*LISTS, *TEXTS)),
    **dict.fromkeys(("ignore_eos", "stream", "echo", "skip_special_tokens", "include_stop_str_in_output", "return_token_ids"), FLAGS),
    **dict.fromkeys(("return_tokens_as_token_ids", "add_special_tokens", "spaces_between_special_tokens", "return_token_strs"), FLAGS),
    "logit_bias": tuple({str(key): value} for key in (0, 511, 512, -1, 2**63, "x") for value in (0, 100, -100, 1e300, -1.7e308))
    + ({str(i): -100 for i in range(512)}, {str(i): 1e300 for i in range(512)}, {"7": "x"}),
    "prompt": (*TEXTS, *IDS, ["a", "b"], [[1], [2]], ["a"] * 40, *([[1] * n] for n in (127, 128, 129)), [5] * 300, "a b " * 60),
    "messages": tuple([{"role": role, "content": text}] for role in ("user", "system", "tool", "x") for text in TEXTS)
    + ([{"role": "user", "content": "a"}] * 50, [{"role": "user"}], [], [{"role": "user", "content": [{"type": "text", "text": "a"}] * 9}]),
    "truncation_side": ("left", "right", "x"),
}  # fmt: skip
MORE = {"banned_token_ids", "no_repeat_ngram_size", "truncate_prompt_tokens", "truncation_side"}
FIELDS = {
    "/v1/completions": sorted({*SAMPLING, *MORE, "prompt", "echo"}),
    "/v1/chat/completions": sorted({*SAMPLING, *MORE, "messages", "max_completion_tokens", "top_logprobs"}),
    "/generate": sorted({*SAMPLING, *MORE, "prompt", "messages"}),
    "/tokenize": ["prompt", "messages", "add_special_tokens", "return_token_strs"],
    "/detokenize": ["tokens"],
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "go on", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 3},
    "/generate": {"prompt": "go on", "max_tokens": 3},
    "/tokenize": {"prompt": "go"},
    "/detokenize": {"tokens": [9, 10]},
}
PATHS = tuple(path for path in FIELDS for _ in range(len(FIELDS[path]) // 4 + 1))


def every_value() -> list[tuple[str, dict[str, Any]]]:
    """Each value of each field of each endpoint alone."""
    return [(p, GOOD[p] | {f: value}) for p, fields in FIELDS.items() for f in fields for value in (*KINDS.get(f, ()), *ODD)]


def several(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Up to four fields at once; temperature above zero now and then, so that the filters and choices come to run."""
    path = draw.choice(PATHS)
    chosen = draw.sample(FIELDS[path], min(len(FIELDS[path]), draw.randrange(1, 5)))
    body = GOOD[path] | {field: draw.choice(KINDS.get(field, ODD)) for field in chosen}
    if draw.random() < 0.5 and path not in ("/tokenize", "/detokenize"):
        body.setdefault("temperature", draw.choice((0, 0.5, 1, 2)))
    return path, body


async def check(server: Server, path: str, body: dict[str, Any]) -> int:
    """200 with something sound in it, or a 4xx that says what is wrong."""
    status, reply = await server.post(path, json.dumps(body).encode())
    assert status < 500, (status, reply[:500], path, body)
    if status == 200 and reply.startswith(b"data: "):
        assert reply.endswith(b"data: [DONE]\n\n"), (reply[-500:], body)
    elif status == 200:
        json.loads(reply)
    else:
        error = json.loads(reply)["error"]
        assert error["message"] and len(error["message"]) < 1000 and error["code"] == status != 429, (error, path, body)
    return status


async def fuzz(server: Server, asked: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """All of it, eight at a time, beside the healthy streams."""
    statuses: list[int] = []
    left = iter(asked)

    async def client() -> None:
        for path, body in left:
            statuses.append(await check(server, path, body))

    async with beside(server) as rounds:
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    assert len(statuses) == len(asked) and all(rounds) and len(rounds) == HEALTHY
    await server.settle()
    return statuses


@pytest.mark.parametrize("kind", ENGINES)
async def test_a_sample_of_every_field(tiny: Path, kind: str) -> None:
    draw = random.Random(kind)
    alone = draw.sample(every_value(), SHORT // 2)
    async with serving(tiny, **SMALL, **ENGINES[kind]) as server:
        statuses = await fuzz(server, [*alone, *(several(draw) for _ in range(SHORT // 2))])
    assert statuses.count(200) > SHORT // 5 and statuses.count(400) > SHORT // 5


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ENGINES)
async def test_a_hundred_thousand(tiny: Path, kind: str) -> None:
    draw = random.Random(f"{kind} long")
    alone = every_value()
    async with serving(tiny, **SMALL, **ENGINES[kind]) as server:
        await fuzz(server, [*alone, *(several(draw) for _ in range(LONG // len(ENGINES) - len(alone)))])
