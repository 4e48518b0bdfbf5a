"""`POST /generate` of the neuron_server note: {prompt, max_tokens, ...} to {model, text, generated_text, finish_reason, usage}."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rayneuron.api.call import Answer, Call, Context, Dialect, Json
from rayneuron.api.choices import gather
from rayneuron.api.openai import chat, completions
from rayneuron.api.openai.events import Events, Writers
from rayneuron.api.stream import ChoiceState
from rayneuron.errors import RequestError
from rayneuron.types import Delta, TokenLogprobs

MAX_TOKENS = 100  # the length the note's own example asks for


def parse(body: Mapping[str, Any], context: Context, *, request_id: str, created: int, client_id: str | None = None) -> Call:
    """A /generate body as a call, told apart by its keys: `messages` is a chat, `prompt` the note's own shape.

    Sampling fields are those of completions; a stream ends with an event that holds the usage.
    """
    words: dict[str, Any] = {"request_id": request_id, "created": created, "client_id": client_id}
    if body.get("messages") is not None:
        return chat.parse(body, context, **words)
    if body.get("prompt") is None:
        raise RequestError("the body needs prompt or inputs (a text), or messages (a chat)", param="prompt")
    for name in ("echo", "logprobs", "prompt_logprobs", "return_token_ids"):
        if body.get(name) not in (None, False):
            raise RequestError(f"{name} has no place in this reply; use /v1/completions", param=name)
    if body.get("n") not in (None, 1):
        raise RequestError("n must be 1 here; use /v1/completions for several choices", param="n")
    call = completions.parse(body, context, max_tokens=MAX_TOKENS, **words)
    if len(call.requests) > 1:
        raise RequestError("prompt must be one text here; use /v1/completions for several", param="prompt")
    return call._replace(answer=ANSWER, head=call.head._replace(include_usage=True))


def _reply(call: Call, deltas: Iterable[Delta]) -> Json:
    gathered = gather(call, deltas)
    choice = gathered.choices[0]
    return {
        "model": call.head.model,
        "text": choice.text,
        "generated_text": choice.text,
        "finish_reason": choice.finish_reason,
        "usage": gathered.usage,
    }


def _chunk(call: Call, progress: ChoiceState, delta: Delta, echoed: list[TokenLogprobs | None] | None) -> Json:
    return {"index": 0, "text": delta.text, "finish_reason": delta.finish_reason}


def _wrap(call: Call, choices: list[Json]) -> Json:
    return {"model": call.head.model, **{name: value for choice in choices for name, value in choice.items() if name != "index"}}


ANSWER = Answer(_reply, partial(Events, Writers(_wrap, lambda call: [], _chunk)))
GENERATE = Dialect(parse)
