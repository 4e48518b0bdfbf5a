"""Adapters as clients name them: as the model, or in a field of its own; and the bodies that load and unload them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rayneuron.api.call import Context
from rayneuron.api.fields import Fields, wrong
from rayneuron.errors import RequestError, UnknownModel

FIELDS = ("adapters", "adapter_id")  # LMI's, which may be a list of one, and TGI's
MOST_NAME, MOST_PATH = 256, 4096  # characters


class Change(NamedTuple):
    """A wish of a client: `path` None unloads. `replaces`: another adapter may have the name already."""

    name: str
    path: str | None = None
    replaces: bool = False


def read_adapter(fields: Fields, context: Context, model: str) -> str | None:
    """The content of the adapter that a body names, None for none. UnknownModel (404) for one that is not there."""
    known, field, name = context.adapters(), "model", model if model not in context.models else None
    for each in FIELDS:
        said = fields.take(each)
        if said in (None, "", [], {}):
            continue
        asked: Any = said[0] if isinstance(said, list) and len(said) == 1 else said
        if not isinstance(asked, str):
            wrong(each, "the name of one adapter", said)
        if not known:
            said = f"{each} is not supported by this server: it has no adapters (lora of its deployment file); leave it out"
            raise RequestError(said, param=each)
        if name in known and name != asked:
            raise RequestError(f"{field} names the adapter `{name}` and {each} another; send one of them", param=each)
        field, name = each, asked
    if name is not None and name not in known and field != "model":
        raise UnknownModel(f"The adapter `{name[:MOST_NAME]}` does not exist.", param=field)
    return None if name is None else known.get(name)


def read_load(body: Mapping[str, Any]) -> Change:
    """/v1/load_lora_adapter: {lora_name, lora_path, load_inplace}."""
    fields = Fields(body)
    name, path = _text(fields, "lora_name", MOST_NAME), _text(fields, "lora_path", MOST_PATH)
    return Change(name, path, fields.flag("load_inplace"))


def read_unload(body: Mapping[str, Any]) -> Change:
    """/v1/unload_lora_adapter: {lora_name}."""
    return Change(_text(Fields(body), "lora_name", MOST_NAME))


def read_registration(fields: Fields) -> Change:
    """LMI's and SageMaker's: {name, src}. `pin` is heard: nothing that is registered is given up."""
    fields.take("pin")
    return Change(_text(fields, "name", MOST_NAME), _text(fields, "src", MOST_PATH))


def find_adapter(name: str, context: Context) -> dict[str, str]:
    """How LMI shows one that is registered. UnknownModel (404) for another."""
    if name not in context.adapters():
        raise UnknownModel(f"The adapter `{name[:MOST_NAME]}` does not exist.", param="name")
    return {"name": name}


def _text(fields: Fields, name: str, most: int) -> str:
    text: str | None = fields.string(name)
    if not text or not text.strip() or len(text) > most or not text.isprintable():
        raise RequestError(f"{name} is required: a printable text of at most {most} characters", param=name)
    return text
