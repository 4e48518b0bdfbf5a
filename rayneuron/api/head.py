"""What a body says about the reply: model, streaming, ids; and the formats this server cannot produce yet."""

from __future__ import annotations

import re

from rayneuron.api.call import Context, Head
from rayneuron.api.fields import Fields, wrong
from rayneuron.errors import RequestError, UnknownModel

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MOST_NAME = 256  # letters of a model's name that every chunk of a reply repeats
_UNCLEAN = re.compile(r"[^\x21-\x7e]+")


def clean_id(given: str | None) -> str | None:
    """A client's request id as it may be logged and echoed: at most 256 printable ASCII characters; None where nothing is left."""
    return (_UNCLEAN.sub("_", given[:1024].strip())[:256] or None) if given else None  # cut first: nobody waits for a megabyte


def reply_id(prefix: str, head: Head, client_id: str | None, request_id: str) -> str:
    """The `id` of a reply: the client's own where it gave one, else the server's."""
    return f"{prefix}-{head.client_id or client_id or request_id}"


def read_head(fields: Fields, context: Context) -> Head:
    """The reply's side of a body. UnknownModel (404) for a model that is not served here."""
    model = fields.string("model", context.models[0])
    if model not in context.models and not (context.any_name and len(model) <= MOST_NAME):
        raise UnknownModel(f"The model `{model}` does not exist.", param="model")
    stream, options = fields.flag("stream"), fields.table("stream_options")
    if options is not None and not stream:
        raise RequestError("stream_options is only allowed together with stream: true", param="stream_options")
    read = Fields(options or {}, "stream_options.")
    include = read.flag("include_usage")
    salt = fields.string("cache_salt", "")
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
        stream_interval=fields.integer("stream_interval", 1, low=1),
        return_token_ids=fields.flag("return_token_ids", context.text.wordless),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
        priority=priority,
        tenant=salt,
        client_id=clean_id(fields.string("request_id")),
    )


def refuse_formats(fields: Fields) -> None:
    """Check response_format and structured_outputs; all but plain text is refused by name until this server can constrain its output."""
    wanted = fields.table("response_format")
    if wanted is not None:
        _response_format(wanted)
    outputs = fields.table("structured_outputs")
    if outputs is None:
        return
    named = [name for name in CONSTRAINTS if outputs.get(name) not in (None, False)]
    if len(named) > 1:
        raise RequestError(f"structured_outputs may name one constraint, got {', '.join(named)}", param="structured_outputs")
    if named:
        raise RequestError(f"structured_outputs.{named[0]} is not supported by this server yet; leave it out", param="structured_outputs")


def _response_format(wanted: dict[str, object]) -> None:
    kind = wanted.get("type")
    if kind not in FORMATS:
        wrong("response_format.type", "one of " + ", ".join(FORMATS), kind)
    if kind == "json_schema":
        body = wanted.get("json_schema")
        if not isinstance(body, dict) or not isinstance(body.get("name"), str):
            raise RequestError("response_format.json_schema is required with type json_schema: {name, schema}", param="response_format")
    if kind != "text":
        said = f"response_format of type {kind} is not supported by this server yet; use {{type: text}}"
        raise RequestError(said, param="response_format")
