"""What other Ray applications get of a stream by handle: OpenAI's chunks, or plain pieces of text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from rayneuron.api import call as api
from rayneuron.api import openai
from rayneuron.serve.flight import Flight
from rayneuron.types import Delta

Json = dict[str, Any]


async def chunks(call: api.Call, flying: AbstractContextManager[Flight], pause_s: Callable[[], float]) -> AsyncIterator[Json]:
    """The chunks of a stream as objects; an error is raised instead of sent. `pause_s`: how long deltas may gather between two chunks."""
    stream = call.open()
    with flying as flight:
        await flight.started()
        out = stream.first()
        while True:
            for chunk in openai.chunks(out):
                yield chunk
            if stream.done or not (deltas := await flight.take()):
                break
            out = b"".join([stream.chunk(delta) for delta in deltas])
            await flight.rest(pause_s())
    for chunk in openai.chunks(stream.last()):
        yield chunk


def plain(call: api.Call, delta: Delta) -> Json:
    """One delta as `generate` yields it."""
    prompt = call.prompt(delta.request_id)
    out: Json = {"index": prompt * call.n + delta.index, "text": delta.text, "token_ids": delta.token_ids}
    out |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
    if delta.logprobs is not None:
        out["logprobs"] = msgspec.to_builtins(delta.logprobs)
    if delta.usage is not None:
        out["usage"] = msgspec.to_builtins(delta.usage)
    return out
