"""TGI's bodies: {inputs, parameters, stream} as a call, and what its routes beside generation say."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rayneuron import __version__
from rayneuron.api.body import MAX_STOPS
from rayneuron.api.call import Call, Context, Json
from rayneuron.api.fields import Fields, wrong
from rayneuron.api.openai import completions
from rayneuron.api.openai.chat import render
from rayneuron.api.retold import said_as
from rayneuron.api.structured import grammar_of_tgi, renamed
from rayneuron.api.tgi.reply import answer
from rayneuron.constraints import MAX_WIDTH
from rayneuron.errors import RequestError

MAX_NEW_TOKENS = 100  # TGI's default
WARPING = ("top_k", "top_p", "typical_p")  # with one of these, or a temperature, tokens are drawn
NAMES = {"prompt": "inputs", "logprobs": "parameters.top_n_tokens", "prompt_logprobs": "parameters.decoder_input_details"} | {
    "structured_outputs": "parameters.grammar"} | {
    ours: f"parameters.{theirs}" for ours, theirs in (("max_tokens", "max_new_tokens"), ("truncate_prompt_tokens", "truncate"))
}


def parse(
    body: Mapping[str, Any],
    context: Context,
    *,
    request_id: str,
    created: int,
    client_id: str | None = None,
    listed: bool = False,
    stream: bool | None = None,
) -> Call:
    """A body as a call; `listed`: a whole reply is a list of one; `stream`: what the route says of it, else the body does."""
    fields = Fields(body)
    inputs, given = fields.string("inputs"), fields.table("parameters", {})
    if not inputs:
        raise RequestError("inputs is required: a text that is not empty", param="inputs")
    asked = fields.flag("stream")
    parameters = Fields(given, "parameters.")
    streams = asked if stream is None else stream
    full, details = parameters.flag("return_full_text"), parameters.flag("details")
    told = _parameters(parameters, streams)
    with said_as(NAMES, "parameters."):
        rest = {"model": fields.take("model"), "prompt": inputs, "stream": streams}
        call = completions.parse({**told, **rest}, context, request_id=request_id, created=created, client_id=client_id)
    call = renamed(call, lambda name: NAMES.get(name, f"parameters.{name}"))
    shape = answer(details, inputs if full else "", listed)
    return call._replace(n=call.best or 1, choices=call.best or 1, answer=shape, unknown=(*call.unknown, *fields.unknown))


parse_listed = partial(parse, listed=True)
parse_stream = partial(parse, stream=True)


def _parameters(given: Fields, streams: bool) -> dict[str, Any]:
    """TGI's parameters as a completion's fields; what is left over is said as it came, and refused there where it would change the text."""
    greedy = not given.flag("do_sample") and given.peek("temperature") in (None, 1) and not any(map(given.peek, WARPING))
    temperature, top_k = given.number("temperature"), given.integer("top_k", low=1)
    parts = {name: given.number(name) for name in WARPING[1:]}
    if temperature is not None and not temperature > 0:
        wrong("parameters.temperature", "a number above 0; leave it and do_sample out for the likeliest token", temperature)
    for name, value in parts.items():
        if value is not None and not 0 < value < 1:
            wrong(f"parameters.{name}", "between 0 and 1, or left out", value)
    prompt = given.flag("decoder_input_details")
    if prompt and streams:
        said = "parameters.decoder_input_details cannot be streamed; leave it out, or send the body without stream"
        raise RequestError(said, param="parameters.decoder_input_details")
    told = {
        "temperature": 0.0 if greedy else temperature,
        "top_k": top_k,
        **parts,
        "max_tokens": given.integer("max_new_tokens", MAX_NEW_TOKENS, low=1),
        "stop": list(given.strings("stop", most=MAX_STOPS)) or None,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": given.integer("truncate", low=1),
        "logprobs": given.integer("top_n_tokens", 0, low=0),
        "prompt_logprobs": 0 if prompt else None,
    }
    told |= grammar_of_tgi(given)
    return {**{name: given.take(name) for name in given.unknown}, **told}


def info(context: Context, waiting: int) -> Json:
    """`/info`."""
    return {
        "model_id": context.models[0],
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": waiting,
        "max_best_of": MAX_WIDTH,
        "max_stop_sequences": MAX_STOPS,
        "max_input_tokens": context.max_model_len - 1,
        "max_total_tokens": context.max_model_len,
        "max_client_batch_size": 1,
        "router": "rayneuron",
        "version": __version__,
    }


def tokenize(body: Mapping[str, Any], context: Context) -> list[Json]:
    """`/tokenize` with `inputs`: {id, text, start, stop} of each token."""
    inputs = Fields(body).string("inputs")
    if not inputs:
        raise RequestError("inputs is required: a text that is not empty", param="inputs")
    return _tokens(context.text.encode(inputs, True, context.max_model_len), context)


def chat_tokenize(body: Mapping[str, Any], context: Context) -> Json:
    """`/chat_tokenize`: a conversation as the template writes it, and its tokens."""
    ids, _ = render(Fields(body), context)
    return {"tokenize_response": _tokens(ids, context), "templated_text": context.text.decode(ids, skip_special_tokens=False)}


def _tokens(ids: list[int], context: Context) -> list[Json]:
    words, place, tokens = context.text.detokenizer([], False), 0, []
    for token_id in ids:
        start, place = place, place + len(words.push(token_id))
        tokens.append({"id": token_id, "text": context.text.token(token_id), "start": start, "stop": place})
    return tokens
