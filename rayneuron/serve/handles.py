"""What other Ray applications call through a handle, in terms of the verbs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from rayneuron.api import call as api
from rayneuron.api import openai
from rayneuron.errors import RequestError
from rayneuron.serve.flight import Flight
from rayneuron.serve.verbs import Json, Server
from rayneuron.types import Delta, SamplingParams


class Handles:
    """The methods of a deployment that is a Server. All raise RayNeuronError subclasses."""

    async def chat(self: Server, body: Json) -> Json | AsyncIterator[Json]:
        """A chat completion by handle; the body and the reply are OpenAI's.

        With `"stream": True` in the body OpenAI's chunks, through `handle.chat.options(stream=True).remote(body)`.
        """
        return await _answer(self, openai.parse_chat, body)

    async def completions(self: Server, body: Json) -> Json | AsyncIterator[Json]:
        """A text completion by handle; the body, the reply and the chunks are OpenAI's, as with `chat`."""
        return await _answer(self, openai.parse_completions, body)

    async def generate(self: Server, prompt: str | list[int] | Json, params: SamplingParams | Json | None = None) -> AsyncIterator[Json]:
        """Stream one prompt by handle: `handle.generate.options(stream=True).remote("Hello", {"max_tokens": 8})`.

        `prompt` is text, token ids, or a whole body with `prompt` or `messages`. Yields {index, text, token_ids, finish_reason,
        stop_reason}, and logprobs and usage where there are any.
        """
        body = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        body |= msgspec.json.decode(msgspec.json.encode(params)) if isinstance(params, SamplingParams) else (params or {})
        if body.get("best_of") is not None:
            raise RequestError("best_of cannot be streamed; send it to handle.completions", param="best_of")
        call, flying = await _fly(self, openai.parse_chat if "messages" in body else openai.parse_completions, body)
        prompts = openai.prompts(call)
        with flying as flight:
            while deltas := await flight.take():
                for delta in deltas:
                    yield _plain(prompts[delta.request_id] * call.n + delta.index, delta)
                await flight.rest()

    async def tokenize(self: Server, body: Json) -> Json:
        """{prompt} or {messages} to {tokens, count, max_model_len}."""
        return await self.now.read(openai.tokenize, body)

    async def detokenize(self: Server, body: Json) -> Json:
        """{tokens} to {prompt}."""
        return await self.now.read(openai.detokenize, body)

    async def models(self: Server) -> Json:
        """The list of models, as /v1/models gives it."""
        return openai.models_list(self.now.cards())

    async def stats(self: Server) -> Json:
        """The engine's load and the calls in flight."""
        return stats_of(self)


def stats_of(server: Server) -> Json:
    """The load, as `stats` and /load say it."""
    load = server.load()
    refused = {} if load.refused is None else {"refused_user_config": load.refused}
    pools = {metric.name.partition(":")[2]: {",".join(labels): n for labels, n in of.items()} for metric, of in load.told.items()}
    told = {"open_calls": load.calls, "open_sequences": load.sequences, "chosen": load.chosen, "profile": msgspec.to_builtins(load.profile)}
    return {**msgspec.to_builtins(load.snapshot), **told, **refused, **({"pools": pools} if pools else {})}


async def _fly(server: Server, parse: Callable[..., api.Call], body: Json) -> tuple[api.Call, AbstractContextManager[Flight]]:
    """A body as a call that is let in, and its flight, not begun."""
    server.now.admit()
    call, arrival_s = await server.now.parse(parse, body), time.monotonic()
    return call, server.now.flight(call, arrival_s, server.now.limits.request_timeout_s)


async def _answer(server: Server, parse: Callable[..., api.Call], body: Json) -> Json | AsyncIterator[Json]:
    now = server.now
    call, flying = await _fly(server, parse, body)
    if call.head.stream:
        return _chunks(call, flying)
    with flying as flight:
        return await now.write(call, await flight.finish(), lambda reply: reply)


async def _chunks(call: api.Call, flying: AbstractContextManager[Flight]) -> AsyncIterator[Json]:
    """The chunks of a stream as objects; an error is raised instead of sent."""
    stream = call.answer.open(call)
    with flying as flight:
        await flight.started()
        out = stream.first()
        while True:
            for chunk in openai.chunks(out):
                yield chunk
            if stream.done or not (deltas := await flight.take()):
                break
            out = b"".join([stream.chunk(delta) for delta in deltas])
            await flight.rest()
    for chunk in openai.chunks(stream.last()):
        yield chunk


def _plain(index: int, delta: Delta) -> Json:
    """One delta as `generate` yields it."""
    out: dict[str, Any] = {"index": index, "text": delta.text, "token_ids": delta.token_ids}
    out |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
    if delta.logprobs is not None:
        out["logprobs"] = msgspec.to_builtins(delta.logprobs)
    if delta.usage is not None:
        out["usage"] = msgspec.to_builtins(delta.usage)
    return out
