"""What the largest value of each field costs the others: memory, and the longest gap of eight streams, beside a legal prompt's."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayneuron.api.body import LONGEST_BAD_WORD, MAX_BAD_WORDS
from rayneuron.policies.admission import SCORES
from rayneuron.serve.deployed import settle_interpreter
from tests.serve.real import HEALTHY, Server, serving

VOCAB, LENGTH, ROWS = 50_000, 1024, 16
MEMORY_BYTES, GAP_S = 64 * 2**20, 0.05
MARGIN = 1
BODY = {"prompt": "go on", "max_tokens": 8, "temperature": 1, "ignore_eos": True}
EVERY = list(range(VOCAB))
WORDS = [f"{n:04d}" + "ab cd " * 60 for n in range(MAX_BAD_WORDS)]
PROMPT = [9] * (LENGTH - 8)

# The largest a server takes, and then what it must refuse as cheaply: bodies of nearly eight megabytes.
LEGAL: dict[str, Callable[[], dict[str, Any]]] = {
    "allowed_token_ids": lambda: {"allowed_token_ids": EVERY},
    "banned_token_ids": lambda: {"banned_token_ids": EVERY[:-1]},
    "stop_token_ids": lambda: {"stop_token_ids": EVERY[:-1], "min_tokens": 8},
    "logit_bias": lambda: {"logit_bias": dict.fromkeys(map(str, EVERY), 1.5)},
    "bad_words": lambda: {"bad_words": [word[:LONGEST_BAD_WORD] for word in WORDS]},
    "short bad_words": lambda: {"bad_words": [f"{n}" for n in range(MAX_BAD_WORDS)]},
    "no_repeat_ngram_size": lambda: {"prompt": PROMPT, "no_repeat_ngram_size": 64, "repetition_penalty": 1.2, "frequency_penalty": 1},
    "all penalties, every choice": lambda: {"prompt": PROMPT, "n": 16, "no_repeat_ngram_size": 64, "repetition_penalty": 1.2},
    "every id, every choice": lambda: {"n": 16, "allowed_token_ids": EVERY, "banned_token_ids": EVERY[9:], "logit_bias": {"5": 1}},
    "every id, many prompts": lambda: {"prompt": ["a", "a b", "a b c"] * 20, "allowed_token_ids": EVERY},
    "n": lambda: {"n": 128},
    "logprobs": lambda: {"n": 16, "logprobs": 20, "max_tokens": SCORES // 21 // 16},
    "prompt_logprobs": lambda: {"prompt": PROMPT, "prompt_logprobs": 20},
    "prompt_logprobs of many": lambda: {"prompt": [PROMPT[: SCORES // 21 // 12]] * 12, "max_tokens": 1, "prompt_logprobs": 20},
    "echo": lambda: {"prompt": [PROMPT[: SCORES // 21 // 12]] * 12, "max_tokens": 0, "echo": True, "logprobs": 20},
    "prompts": lambda: {"prompt": [[9] * 100] * 130, "max_tokens": 1},
    "cache_salt": lambda: {"prompt": PROMPT, "cache_salt": "\U0001f511" * 256, "n": 16},
    "request_id": lambda: {"request_id": "e " * 3_900_000},
}
REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "a million allowed_token_ids": lambda: {"allowed_token_ids": [7] * 1_000_000},
    "390,000 allowed_token_ids": lambda: {"allowed_token_ids": [7] * 390_000},
    "390,000 token ids": lambda: {"prompt": [7] * 390_000},
    "700,000 bad_words": lambda: {"bad_words": ["x"] * 700_000},
    "one bad word": lambda: {"bad_words": ["x" * 7_900_000]},
    "empty arrays": lambda: {"prompt": [[]] * 2_500_000},
    "empty objects": lambda: {"stop": [{}] * 2_500_000},
    "names": lambda: {f"n{n}": 1 for n in range(130_000)},
    "probabilities": lambda: {"prompt": [[9] * 900] * 12, "max_tokens": 1, "prompt_logprobs": 20},
    "choices": lambda: {"prompt": ["a"] * 30, "n": 128},
    "top_k": lambda: {"top_k": 10**4000},
    "a long cache_salt": lambda: {"cache_salt": "x" * 7_900_000},
    "stop": lambda: {"stop": [f"{n}" + "ab" * 950_000 for n in range(4)], "n": 16},
    "a text of eight megabytes": lambda: {"prompt": "ab cd " * 1_300_000},
    "a text without a space": lambda: {"prompt": "ab" * 3_900_000},
}


@pytest.fixture(scope="module")
def wide(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny model with fifty thousand ids, of which its tokenizer spells the first 512."""
    path = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny, path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.shape[0] == 512 and ("embed" in name or "lm_head" in name):
            tensors[name] = torch.cat([tensor, tensor.new_full((VOCAB - 512, tensor.shape[1]), 1e-6)])  # none of them among the likeliest
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB}))
    yield path
    shutil.rmtree(path)


class Watch:
    """The longest gap between two parts of four healthy streams, and the most memory, since `reset`.

    Every running stream has a token in the same step; one whose token is half a character has no part then, but hardly four of them.
    A gap is what the clock says or what this process has computed in it, whichever is less: other processes take the clock's time.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}
        self._heard = asyncio.Event()
        self.gap_s = 0.0

    def begin(self, number: int) -> None:
        """A new stream: what it waits for its first part is no gap."""
        self._last.pop(number % 2, None)

    def part(self, number: int) -> None:
        number %= 2
        now = time.perf_counter(), time.process_time()
        before = self._last.get(number, now)
        self.gap_s = max(self.gap_s, min(now[0] - before[0], now[1] - before[1]))
        self._last[number] = now
        self._heard.set()

    async def news(self) -> None:
        """Wait for the next part of any stream."""
        self._heard.clear()
        await self._heard.wait()

    def reset(self) -> int:
        """Start anew; the resident bytes now."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak falls to what is resident
        self.gap_s = 0.0
        return self.peak()

    @staticmethod
    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@asynccontextmanager
async def as_an_actor() -> AsyncIterator[None]:
    """The interpreter as `serve.app` sets it for a replica."""
    before = sys.getswitchinterval()
    settle_interpreter()
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[tuple[Server, Watch]]:
    """A server with eight streams that never pause."""
    watch, over = Watch(), False
    more = {"max_model_len": LENGTH, "max_num_seqs": ROWS + HEALTHY, "serving": {"stream_events_per_s": 1e6}}
    async with serving(path, **more) as server, as_an_actor():
        async with asyncio.TaskGroup() as group:

            async def again(number: int) -> None:
                alone = None
                while not over:
                    watch.begin(number)
                    text = await server.stream(number, 100, lambda _: watch.part(number))
                    assert text == (alone := alone or text)

            for number in range(HEALTHY):
                group.create_task(again(number))
            yield server, watch
            over = True
        await server.settle()


def dense(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


async def cost(server: Server, watch: Watch, body: bytes) -> tuple[int, int, float]:
    """Status, bytes and longest gap of one call."""
    before = watch.reset()
    status, _ = await server.post("/v1/completions", body)
    await watch.news()  # a call may be over before the streams hear of what it cost
    return status, watch.peak() - before, watch.gap_s


@pytest.mark.slow
async def test_the_largest_value_of_each_field(wide: Path) -> None:
    """A gap is held against that of a legal prompt of the whole length in the same run, and memory against what was resident before."""
    legal = {name: dense(BODY | make()) for name, make in LEGAL.items()}
    refused = {name: dense(BODY | make()) for name, make in REFUSED.items()}
    control = dense(BODY | {"prompt": [9] * (LENGTH - 1), "max_tokens": 1})
    rows, failed = [], []
    async with watched(wide) as (server, watch):
        for _ in range(2):
            controls = [await cost(server, watch, control) for _ in range(5)]
        allowed_s = max(gap for _, _, gap in controls) + GAP_S
        for expected, bodies in ((200, legal), (400, refused)):
            for name, body in bodies.items():
                status, used, gap_s = await best(server, watch, body)
                rows.append(f"{name:32} {status} {used / 2**20:6.1f} MiB {gap_s * 1000:7.1f} ms (allowed {allowed_s * 1000:.1f})")
                if status != expected or used > MEMORY_BYTES or gap_s > allowed_s:
                    failed.append(rows[-1])
    print("\n".join(rows))
    assert not failed, "\n".join(failed)


async def best(server: Server, watch: Watch, body: bytes) -> tuple[int, int, float]:
    """The least gap of three calls, and the most memory: what a busy machine adds to a gap is not the server's."""
    tries = [await cost(server, watch, body) for _ in range(3)]
    return tries[0][0], max(used for _, used, _ in tries), min(gap for _, _, gap in tries)
