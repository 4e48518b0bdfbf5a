"""What a body says its output must match: response_format, structured_outputs, and the old guided_ names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rayneuron.api.call import Call
from rayneuron.api.fields import Fields, wrong
from rayneuron.constraints import KINDS, StructuredOutputs
from rayneuron.errors import RequestError

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
OLD = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar", "json_object")} | {"guided_whitespace_pattern": ""}
OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_fallback", "disable_additional_properties")
CONSTRAINTS = ("response_format", "structured_outputs", *OLD)  # the fields that may hold one
TEXTS = {"regex": "a regular expression", "grammar": "a Lark or GBNF grammar"}


def read_structured(fields: Fields) -> StructuredOutputs | None:
    """The one constraint of a body, None where it has none. RequestError for two, or for one of the wrong form."""
    pattern = fields.string("guided_whitespace_pattern")
    found = [each for each in (_response_format(fields), _structured_outputs(fields)) if each is not None]
    for name, kind in OLD.items():
        value = fields.take(name)
        if value not in (None, False, "", []) and kind:
            found.append(StructuredOutputs(**_constraint(name, kind, value), whitespace_pattern=pattern, field=name))
    if len(found) > 1:
        raise RequestError(f"{found[0].field} and {found[1].field} both constrain the output; send one", param=found[1].field)
    return found[0] if found else None


def grammar_of_tgi(given: Fields, name: str = "grammar") -> dict[str, Any]:
    """TGI's `grammar` {type, value} as a field of OpenAI's bodies, where it is one; {} without."""
    if not isinstance(given.peek(name), dict):
        return {}
    said = given.take(name)
    kind, value = said.get("type"), said.get("value")
    if kind == "json_schema" and isinstance(value, dict):
        kind, value = "json", value.get("schema")
    if kind not in ("json", "regex") or value is None:
        wrong(f"parameters.{name}", "{type: json, value: a schema}, {type: json_schema, value: {schema}} or {type: regex, value}", said)
    return {"structured_outputs": {kind: value}}


def renamed(call: Call, name: Callable[[str], str]) -> Call:
    """The call, with constraints that say of themselves what their field is called in this dialect; also errors that come later do."""
    for request in call.requests:
        said = request.params.structured_outputs
        if said is not None:
            request.params = replace(request.params, structured_outputs=replace(said, field=name(said.field)))
    return call


def _response_format(fields: Fields) -> StructuredOutputs | None:
    name = "response_format"
    said = fields.table(name)
    if said is None:
        return None
    kind = said.get("type")
    if kind not in FORMATS:
        wrong("response_format.type", "one of " + ", ".join(FORMATS), kind)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True, field=name)
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag={key: value for key, value in said.items() if key != "type"}, field=name)
    body = said.get("json_schema")
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        raise RequestError("response_format.json_schema is required with type json_schema: {name, schema}", param=name)
    if not isinstance(body.get("schema"), dict):
        wrong("response_format.json_schema.schema", "a JSON schema (an object)", body.get("schema"))
    return StructuredOutputs(json=body["schema"], field=name)


def _structured_outputs(fields: Fields) -> StructuredOutputs | None:
    name = "structured_outputs"
    said = fields.table(name)
    if said is None:
        return None
    unknown = sorted(set(said) - {*KINDS, *OPTIONS})
    if unknown:
        known = ", ".join((*KINDS, *OPTIONS[:2]))
        raise RequestError(f"{name}.{unknown[0][:64]} is no constraint; known are {known}", param=name)
    if said.get("disable_additional_properties"):
        said_instead = "say additionalProperties: false in the schema"
        raise RequestError(f"{name}.disable_additional_properties is not supported: {said_instead}", param=name)
    named = [kind for kind in KINDS if said.get(kind) is not None and not (kind == "json_object" and said[kind] is False)]
    if len(named) > 1:
        raise RequestError(f"{name} may name one constraint, got {', '.join(named)}", param=name)
    options = Fields(said, f"{name}.")
    compact, pattern = options.flag("disable_any_whitespace"), options.string("whitespace_pattern")
    if not named:
        return None
    how: dict[str, Any] = {"disable_any_whitespace": compact, "whitespace_pattern": pattern, "field": name}
    return StructuredOutputs(**_constraint(f"{name}.{named[0]}", named[0], said[named[0]]), **how)


def _constraint(name: str, kind: str, value: object) -> dict[str, Any]:
    """A value of the right form, as a word of StructuredOutputs."""
    if kind == "json_object":
        if value is not True:
            wrong(name, "true", value)
    elif kind in TEXTS:
        if not isinstance(value, str) or not value:
            wrong(name, TEXTS[kind], value)
    elif kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
            wrong(name, "an array of strings, at least one", value)
        value = tuple(value)
    elif not isinstance(value, (dict, str)) or value == "":
        wrong(name, "an object, or its JSON text", value)
    return {kind: value}
