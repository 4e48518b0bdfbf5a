"""LMI's bodies: {inputs, parameters, stream} as a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayneuron.api.call import Call, Context
from rayneuron.api.fields import Fields
from rayneuron.api.lmi.reply import answer
from rayneuron.api.openai import completions
from rayneuron.api.retold import said_as
from rayneuron.api.structured import grammar_of_tgi, renamed
from rayneuron.errors import RequestError

MAX_NEW_TOKENS = 30  # LMI's default
SAMPLING = ("temperature", "top_p", "top_k", "typical_p", "min_p")  # what says that a body wants to sample
NAMES = {
    "adapters": "adapters",
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "logprobs": "parameters.top_n_tokens",
    "prompt_logprobs": "parameters.decoder_input_details",
    "truncate_prompt_tokens": "parameters.truncate",
}


def parse(body: Mapping[str, Any], context: Context, *, request_id: str, created: int, client_id: str | None = None) -> Call:
    """A body as a call."""
    fields = Fields(body)
    inputs, given, streams = fields.string("inputs"), fields.table("parameters", {}), fields.flag("stream")
    if not inputs:
        raise RequestError("inputs is required: a text that is not empty", param="inputs")
    parameters = Fields(given, "parameters.")
    streams = context.lmi.output_formatter != "json" if context.lmi.output_formatter is not None else streams
    full, details = parameters.flag("return_full_text"), parameters.flag("details") or context.lmi.tgi_compat
    told = _parameters(parameters)
    with said_as(NAMES, "parameters."):
        rest = {"model": fields.take("model"), "adapters": fields.take("adapters"), "prompt": inputs, "stream": streams}
        call = completions.parse({**told, **rest}, context, request_id=request_id, created=created, client_id=client_id)
    call = renamed(call, lambda name: f"parameters.{name}")
    shape = answer(context.lmi, inputs, full, details)
    return call._replace(n=call.best or 1, choices=call.best or 1, answer=shape, unknown=(*call.unknown, *fields.unknown))


def _parameters(given: Fields) -> dict[str, Any]:
    """LMI's parameters as a completion's fields; what is left over is said as it came: vLLM's names are LMI's too."""
    samples = given.flag("do_sample", any(name in given for name in SAMPLING))
    if given.integer("n", 1, low=1) > 1:
        said = "parameters.n is not supported by this server; send best_of, whose others are in details.best_of_sequences"
        raise RequestError(said, param="parameters.n")
    stops = [*given.strings("stop"), *given.strings("stop_sequences")]
    ids = given.take("stop_token_ids")
    told = {
        "max_tokens": given.integer("max_new_tokens", MAX_NEW_TOKENS, low=1),
        "stop": stops or None,
        "stop_token_ids": [ids] if isinstance(ids, int) else ids,
        "truncate_prompt_tokens": given.integer("truncate", low=1),
        "logprobs": given.integer("top_n_tokens", given.integer("logprobs", 0, low=0), low=0),
        "prompt_logprobs": 0 if given.flag("decoder_input_details") else given.integer("prompt_logprobs", low=0),
        "ignore_eos": given.flag("ignore_eos_token", given.flag("ignore_eos")),
    }
    if not samples:
        told |= dict.fromkeys(SAMPLING[1:]) | {"temperature": 0}
        for name in SAMPLING:
            given.take(name)
    told |= grammar_of_tgi(given)
    given.take("cached_prompt")
    return {**{name: given.take(name) for name in given.unknown}, **told}
