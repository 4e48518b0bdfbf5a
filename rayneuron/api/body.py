"""What both endpoints read alike in a body: the reply's side, the sampling parameters, the length; and what is not served here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from rayneuron.api.adapters import FIELDS, read_adapter
from rayneuron.api.beams import SEARCH, read_beams
from rayneuron.api.call import Context, Head
from rayneuron.api.fields import Fields, clean_id, token_ids, whole, wrong
from rayneuron.api.structured import CONSTRAINTS, read_structured
from rayneuron.api.unserved import Unserved
from rayneuron.errors import ConfigError, RequestError, UnknownModel
from rayneuron.policies.admission import room
from rayneuron.types import MAX_BIAS, MAX_LOGPROBS, SamplingParams

NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
FROM_FILE = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "max_tokens")
# They shape the reply, or are derived.
NO_DEFAULT = ("logprobs", "logprob_token_ids", "prompt_logprobs", "bad_words_ids", "structured_outputs", "beams")
MAX_STOPS = 128  # more than any program sends; they are one automaton, and their characters are counted beside
MAX_BAD_WORDS, LONGEST_BAD_WORD = 1000, 64  # each is looked for in every step; characters
# Of a body's head, what hardly any has.
SELDOM = (
    "cache_salt", "session_id", "kv_transfer_params", "logits_processors", "priority", "stream_interval", "return_token_ids",
    "return_tokens_as_token_ids", "request_id",
)  # fmt: skip
MOST_NAME = 256  # letters of a model's name that every chunk of a reply repeats


def read_common(fields: Fields, context: Context, unserved: Unserved) -> tuple[Head, dict[str, Any]]:
    """The reply's side of a body, and words of SamplingParams; lengths and logprobs are the endpoint's own. `unserved`: what it refuses."""
    head = read_head(fields, context)
    constraint = read_structured(fields) if fields.holds(CONSTRAINTS) else None
    beams = read_beams(fields, head.stream) if fields.holds(SEARCH) else None
    _refuse_unserved(fields, unserved)
    fields.string("user")
    words = read_sampling(fields, context)
    if constraint is not None:
        words["structured_outputs"] = constraint
    if beams is not None:
        words["beams"] = beams
    if head.stream and "prompt_logprobs" in words:
        raise RequestError("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
    return head, words


def read_head(fields: Fields, context: Context) -> Head:
    """The reply's side of a body. UnknownModel (404) for a model that is not served here."""
    model = fields.string("model", context.models[0])
    named = model not in context.models or fields.holds(FIELDS)
    adapter = read_adapter(fields, context, model) if named else None
    if adapter is None and model not in context.models and not (context.any_name and len(model) <= MOST_NAME):
        raise UnknownModel.named(model, context.models)
    stream, options = fields.flag("stream"), fields.table("stream_options")
    if options is not None and not stream:
        raise RequestError("stream_options is only allowed together with stream: true", param="stream_options")
    read = Fields(options or {}, "stream_options.")
    include = read.flag("include_usage")
    if not fields.holds(SELDOM):
        continuous, ids = read.flag("continuous_usage_stats") and include, context.text.wordless
        return Head(model, stream, include, continuous, context.stream_interval, ids, adapter=adapter)
    salt = fields.string("cache_salt", "")
    if len(salt) > MOST_NAME:  # it is hashed on the engine's thread
        raise RequestError(f"cache_salt may hold at most {MOST_NAME} characters, got {len(salt)}; send a hash of it", param="cache_salt")
    fields.string("session_id")
    fields.refuse("kv_transfer_params")
    fields.refuse("logits_processors")
    priority = fields.integer("priority", 0, low=-(2**31), high=2**31 - 1)
    if priority and not context.client_priority:
        said = "priority is not for clients of this server to set; leave it out (the deployment allows it by limits.client_priority: true)"
        raise RequestError(said, param="priority")
    return Head(
        model=model,
        stream=stream,
        include_usage=include,
        continuous_usage=read.flag("continuous_usage_stats") and include,
        stream_interval=fields.integer("stream_interval", context.stream_interval, low=1),
        return_token_ids=fields.flag("return_token_ids", context.text.wordless),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
        priority=priority,
        cache_salt=salt,
        adapter=adapter,
        client_id=clean_id(fields.string("request_id")),
    )


def reply_id(prefix: str, head: Head, client_id: str | None, request_id: str) -> str:
    """The `id` of a reply: the client's own where it gave one, else the server's."""
    return f"{prefix}-{head.client_id or client_id or request_id}"


def _refuse_unserved(fields: Fields, unserved: Unserved) -> None:
    """400 by name for a field known somewhere that would change the answer; values that change nothing are taken off."""
    for name in fields.unknown:
        instead, harmless = ("send n", (1, fields.peek("n"))) if name == "best_of" else unserved.get(name, ("", None))
        if harmless is not None and not _among(fields.take(name), harmless):
            raise RequestError(f"{name} is not supported by this server: {instead}", param=name)


def _among(value: object, harmless: tuple[Any, ...]) -> bool:
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)


def sampling_defaults(generation_config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Sampling defaults of a model: what its generation_config.json says, then what the deployment says.

    `max_new_tokens` means `max_tokens`. What the file says beside sampling (ids, cache switches) is passed over; ConfigError for an unknown
    name in `overrides` or a wrong value in either.
    """
    merged: dict[str, Any] = {}
    for source, ours in ((generation_config, False), (overrides or {}, True)):
        for name, value in source.items():
            known = "max_tokens" if name == "max_new_tokens" else name
            if ours and (known not in SamplingParams.__struct_fields__ or known in NO_DEFAULT):
                raise ConfigError(f"{name} is not a sampling default", param=name)
            if value is not None and (ours or known in FROM_FILE):
                merged[known] = value
    try:
        msgspec.convert(merged, SamplingParams, str_keys=True)
        Fields(merged).strings("stop", most=MAX_STOPS)
    except (msgspec.ValidationError, RequestError) as bad:
        raise ConfigError(f"sampling defaults: {bad}", param=getattr(bad, "param", None)) from bad
    return merged


def check_defaults(context: Context) -> None:
    """Refuse defaults with which no request could be answered. Raises ConfigError."""
    try:
        fit(read_sampling(Fields({}), context), 1, None, context.defaults.get("max_tokens"), context.max_model_len)
    except RequestError as wrong:
        raise ConfigError(f"sampling defaults: {wrong.message}", param=wrong.param) from wrong


def read_sampling(fields: Fields, context: Context) -> dict[str, Any]:
    """Words of SamplingParams from the fields both endpoints share; lengths and logprobs are the endpoint's own."""
    if context.defaults:
        fields.fill({name: value for name, value in context.defaults.items() if name != "max_tokens"})
    words: dict[str, Any] = {"n": 1, "skip_special_tokens": True}  # what is asked for is a few of them
    for name in fields.names(SAMPLING):
        value = SAMPLING[name](fields, name, context)
        if value is not None:
            words[name] = value
    if "bad_words" in words:
        words["bad_words_ids"] = context.text.bad_words_ids(words["bad_words"])
    return words


def read_logprobs(fields: Fields, name: str) -> int | None:
    """A count of alternatives a token; -1 (the whole vocabulary) exceeds the cap and is refused like any larger count."""
    count: int | None = fields.integer(name)
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        wrong(name, f"between 0 and {MAX_LOGPROBS} (-1, the whole vocabulary, is more than this server returns)", count)
    return count


def read_logprob_ids(fields: Fields, context: Context, logprobs: int | None) -> tuple[int, ...]:
    """`logprob_token_ids`: whose probabilities are told at each token instead of the likeliest ones'; each once, in this order."""
    ids = tuple(dict.fromkeys(fields.ids("logprob_token_ids", context.vocab_size)))
    if ids and logprobs is None:
        raise RequestError("logprob_token_ids needs logprobs, which shows probabilities at all", param="logprob_token_ids")
    return ids


def fit(words: Mapping[str, Any], prompt: int, asked: int | None, default: int | None, limit: int, name: str = "max_tokens") -> int:
    """Output tokens for a prompt of that many tokens. An `asked` that does not fit is refused, a default is cut to what fits.

    `default` None: as many as fit. `limit`: prompt and output together. `name`: the field that asked.
    """
    left = room(prompt, asked, limit, prompt_name="input_tokens", name=name)
    tokens = asked if asked is not None else left if default is None else min(default, left)
    if words.get("min_tokens", 0) > tokens:
        raise RequestError(f"min_tokens {words['min_tokens']} is greater than {name} {tokens}", param="min_tokens")
    return tokens


def truncate(fields: Fields, context: Context, output: int) -> tuple[int | None, str]:
    """How many prompt tokens to keep (None: all) and from which side to cut; -1 keeps what leaves room for `output` tokens."""
    side = fields.string("truncation_side", "left", among=("left", "right"))
    keep: int | None = fields.integer("truncate_prompt_tokens")
    if keep is None:
        return None, side
    if keep == -1:
        return max(1, context.max_model_len - output), side
    return whole("truncate_prompt_tokens", keep, 1, context.max_model_len), side


def cut(ids: list[int], keep: int | None, side: str) -> list[int]:
    """The ids that stay when the prompt is cut to `keep` tokens."""
    if keep is None or len(ids) <= keep:
        return ids
    return ids[:keep] if side == "right" else ids[len(ids) - keep :]


def _bias(given: dict[str, Any] | None, vocab_size: int) -> dict[int, float] | None:
    if not given:
        return None
    if len(given) > vocab_size:
        raise RequestError(f"logit_bias may hold at most {vocab_size} token ids, got {len(given)}", param="logit_bias")
    bias: dict[int, float] = {}
    for key, value in given.items():
        try:
            token_id = int(key)
        except ValueError:
            wrong("logit_bias", "an object from token ids to numbers", key)
        if type(value) not in (int, float):
            wrong("logit_bias", "an object from token ids to numbers", value)
        token_ids("logit_bias", [token_id], vocab_size)
        bias[token_id] = max(-MAX_BIAS, min(MAX_BIAS, float(value) if abs(value) < 1e308 else MAX_BIAS * (1 if value > 0 else -1)))
    return bias


def _number(fields: Fields, name: str, context: Context) -> Any:
    return fields.number(name)


def _flag(fields: Fields, name: str, context: Context) -> bool:
    return fields.flag(name)


def _ids(fields: Fields, name: str, context: Context) -> tuple[int, ...]:
    return fields.ids(name, context.vocab_size)


def _within(low: int, high: int | None = None) -> Callable[[Fields, str, Context], Any]:
    return lambda fields, name, context: fields.integer(name, low=low, high=high)


# How each field of SamplingParams is read where a body has it; the rest are the endpoint's own.
SAMPLING: Final[dict[str, Callable[[Fields, str, Context], Any]]] = {
    **dict.fromkeys(NUMBERS, _number),
    "bad_words": lambda fields, name, context: fields.strings(name, most=MAX_BAD_WORDS, longest=LONGEST_BAD_WORD),
    "n": _within(1, 128),
    "top_k": _within(-1),
    "no_repeat_ngram_size": _within(0),
    "seed": _within(-(2**63), 2**63 - 1),
    "min_tokens": _within(0),
    "stop": lambda fields, name, context: fields.strings(name, most=MAX_STOPS),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "banned_token_ids"), _ids),
    "logit_bias": lambda fields, name, context: _bias(fields.table(name), context.vocab_size),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"), _flag),
    "prompt_logprobs": lambda fields, name, context: read_logprobs(fields, name),
}
