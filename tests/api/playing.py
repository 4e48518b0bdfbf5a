"""A played engine: chosen token ids cut into steps in every way, through Assembler and dialect."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rayneuron.api.call import Call, Context
from rayneuron.text.assembler import Assembler
from rayneuron.text.text import Text
from rayneuron.types import Delta, Request, TokenDelta, TokenLogprobs


def context(text: Text, **words: Any) -> Context:
    """A server of one model."""
    return Context(**({"models": ("tiny",), "text": text, "max_model_len": 512, "vocab_size": text.vocab_size} | words))


def cuts(length: int) -> Iterator[list[int]]:
    """Every way to cut `length` tokens into steps of at least one, as step sizes."""
    for marks in itertools.product((False, True), repeat=max(0, length - 1)):
        sizes, size = [], 1
        for mark in marks:
            if mark:
                sizes.append(size)
                size = 0
            size += 1
        yield [*sizes, size] if length else []


def probability(token_id: int, top: int, vocab_size: int) -> TokenLogprobs:
    """Made-up but consistent: the chosen token has rank 2, or 1 if nothing else is shown."""
    others = tuple(((token_id + step) % vocab_size, -0.25 * (step + 1) if step % 3 else -math.inf) for step in range(1, top + 1))
    return TokenLogprobs(token_id, -0.4 - token_id / 1000, 2 if top else 1, others)


def play(
    request: Request,
    ids: Sequence[int],
    sizes: Iterable[int],
    *,
    vocab_size: int = 1000,
    index: int = 0,
    finish: str = "length",
    eos: bool = False,
    stop_token: int | None = None,
) -> list[TokenDelta]:
    """The engine's deltas of one choice: `ids` in steps of `sizes`, with the probabilities the request asks for."""
    params, deltas, place = request.params, [], 0
    for size in sizes:
        part = list(ids[place : place + size])
        place += size
        deltas.append(TokenDelta(request.id, index, part))
        if params.logprobs is not None:
            deltas[-1].logprobs = [probability(token_id, params.logprobs, vocab_size) for token_id in part]
    if not deltas:
        deltas.append(TokenDelta(request.id, index, [], logprobs=None if params.logprobs is None else []))
    last = deltas[-1]
    last.finish_reason, last.eos, last.stop_token = finish, eos, stop_token  # type: ignore[assignment]
    deltas[0].cached_tokens = 3
    if params.prompt_logprobs is not None and index == 0:
        rest = [probability(token_id, params.prompt_logprobs, vocab_size) for token_id in request.prompt_ids[1:]]
        deltas[0].prompt_logprobs = [None, *rest]
    return deltas


def assemble(request: Request, text: Text, deltas: Iterable[TokenDelta]) -> list[Delta]:
    """What the Assembler makes of them."""
    assembler = Assembler(request, text)
    return [made for made in map(assembler.push, deltas) if made is not None]


def events(call: Call, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    """The parsed events of the stream; asserts its framing and its end."""
    stream = call.answer.open(call)
    raw = stream.first() + b"".join(stream.chunk(delta) for delta in deltas)
    assert stream.done
    raw += stream.last()
    parts = raw.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""], parts[-2:]
    assert all(part.startswith(b"data: ") for part in parts[:-1])
    return [json.loads(part[6:]) for part in parts[:-2]]


def join(chunks: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream, a choice: text, finish and stop reason, joined logprobs and ids."""
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            empty = {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None, "token_ids": []}
            seen = joined.setdefault(choice["index"], empty)
            delta = choice.get("delta")
            seen["text"] += choice["text"] if delta is None else delta.get("content", "")
            assert seen["finish_reason"] is None, "a chunk after the finish"
            seen["finish_reason"] = choice["finish_reason"]
            if choice["finish_reason"] is not None:
                seen["stop_reason"] = choice["stop_reason"]
            seen["token_ids"] += choice.get("token_ids", [])
            for name, items in (choice["logprobs"] or {}).items():
                if items is not None:
                    seen["logprobs"] = seen["logprobs"] or {}
                    seen["logprobs"].setdefault(name, []).extend(items)
    return joined
