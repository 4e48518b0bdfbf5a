"""Mappings held against pydantic sections: every wrong key with its place, its path and the nearest right word, in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, field_validator
from pydantic.fields import FieldInfo

from rayneuron.errors import ConfigError

Made = TypeVar("Made", bound=BaseModel)
KeyPath = tuple[str | int, ...]
Locate = Callable[[KeyPath, str], str]  # a path and what is said of it -> where that stands ("deployment.yaml:12: ")

LARGEST = 2**63 - 1  # what is larger fits no counter, and no message
LATER = ("args", "user_config")  # of an application: each is held against a section of its own
KEY = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:.+|sha256:[0-9a-fA-F]{64}")  # where a key is read; never a key itself
SECRET = ("api_keys",)  # lists whose entries may be keys by mistake: never repeated
# Names that were, or that others have, and that must not be passed over as misspelled.
REFUSED = {
    "trust_remote_code": "is refused: the code of a model directory is never run; leave it out",
    "api_key": "is gone, a key is never written into a deployment file; write serving.api_keys: [env:NAME], [file:PATH] or [sha256:HEX]",
}
_WANTED = {
    "int_type": "a whole number", "float_type": "a number", "string_type": "text", "bool_type": "true or false", "list_type": "a list",
    "dict_type": "a mapping of keys", "model_type": "a mapping of keys", "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}", "greater_than": "more than {gt}", "less_than_equal": "at most {le}",
    "string_too_short": "text that is not empty", "too_short": "a list with at least {min_length} entry",
}  # fmt: skip


class Section(BaseModel):
    """A part of a file: unknown keys are refused, and no value stands for another (true for 1, "4" for 4)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _sound(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if info.field_name not in LATER:
            _check_sound(value)
        return value


def validate(kind: type[Made], values: object, place: Locate = lambda path, text: "") -> Made:
    """`values` as a `kind`. Raises ConfigError with everything that is wrong, each part after its `place`; `param` is the first path."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{place((), '')}needs a mapping of keys, got {_short(values)}")
    try:
        return kind.model_validate(dict(values))
    except pydantic.ValidationError as error:
        found: dict[KeyPath, list[str]] = {}
        for problem in error.errors(include_url=False):
            path = _path(values, problem["loc"], problem["type"] in ("missing", "extra_forbidden"))
            found.setdefault(path, []).append(_say(kind, path, problem))
    said = []
    for path, reasons in found.items():
        text = _joined(reasons)
        said.append(place(path, text) + text)
    raise ConfigError("; ".join(said), param=dotted(next(iter(found))) or None)


def dotted(path: Iterable[str | int]) -> str:
    """("model", "path") as people write it: model.path."""
    return ".".join(str(part) for part in path)


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint at the known word that is most like `name`, else at all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"


def override(args: Mapping[str, Any], assignments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `args` with dotted keys set: {"model.path": "/tiny", "device": "cpu"}. Raises ConfigError for a key in a plain value."""
    out = dict(args)
    for dotted, value in assignments.items():
        head, _, rest = dotted.partition(".")
        if not rest:
            out[head] = value
            continue
        inside = out.get(head)
        if not isinstance(inside, Mapping | None):
            raise ConfigError(f"{head} is a plain value and holds no {rest}; set {head} itself", param=head)
        out[head] = override(inside or {}, {rest: value})
    return out


def _check_sound(value: object) -> None:
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"is beyond any size; write at most {LARGEST}")
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError("holds a character that no file and no text can have (NUL or a lone surrogate)")
    elif isinstance(value, Mapping):
        for item in (*value.keys(), *value.values()):
            _check_sound(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_sound(item)


def _path(values: object, loc: KeyPath, absent: bool) -> KeyPath:
    """The keys of `values` that pydantic's path goes through; its names for the branches of a union are none."""
    path, at = [], values
    for part in loc:
        if (isinstance(at, Mapping) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            path.append(part)
            at = at[part]  # type: ignore[index]
    return tuple(path) if not absent or tuple(path) == loc else (*path, loc[-1])


def _say(kind: type[BaseModel], path: KeyPath, problem: Any) -> str:
    name = dotted(path)
    if problem["type"] == "extra_forbidden":
        return f"{name} {REFUSED[str(path[-1])]}" if path[-1] in REFUSED else f"unknown key {name}{_hint(kind, path)}"
    if problem["type"] == "missing":
        return f"{name} is missing"
    reason = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{name}: {reason}" if name and not reason.startswith(name) else reason
    context = problem.get("ctx") or {}
    got = "" if any(part in SECRET for part in path) else f", got {_short(problem['input'])}"
    if problem["type"] == "literal_error":
        words = [word.strip("' ") for word in str(context["expected"]).replace(" or ", ", ").split(",")]
        hint = nearest(problem["input"], words) if isinstance(problem["input"], str) and len(words) > 1 else ""
        return f"{name}: must be {'one of ' if len(words) > 1 else ''}{', '.join(words)}{got}{hint if 'mean' in hint else ''}"
    wanted = _WANTED.get(problem["type"])
    return f"{name}: must be {wanted.format(**context)}{got}" if wanted else f"{name}: {reason}"


def _joined(reasons: Sequence[str]) -> str:
    """The branches of a union failed one by one: "must be a whole number, got x; or auto"."""
    first, *more = dict.fromkeys(reasons)
    return first + "".join(f", or {_branch(reason)}" for reason in more)


def _branch(reason: str) -> str:
    return reason.partition(": must be ")[2].partition(", got ")[0] or reason


def _hint(kind: type[BaseModel], path: KeyPath) -> str:
    """The nearest key of the same section, or the place where exactly this key belongs."""
    section, name = _section(kind, path[:-1]), str(path[-1])
    known = list(section.model_fields)
    elsewhere = [key for key in keys(kind) if key.rpartition(".")[2] == name]
    if elsewhere and not difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return f"; did you mean {elsewhere[0]}?"
    return nearest(name, known)


def keys(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a section and of those in it, dotted."""
    return (name for name, _ in fields(kind, prefix))


def fields(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """As `keys`, each with what is known of it."""
    for name, field in kind.model_fields.items():
        inner = _model(field.annotation)
        yield prefix + name, field
        if inner is not None:
            yield from fields(inner, f"{prefix}{name}.")


def no_key_itself(value: list[str] | None) -> list[str] | None:
    """What says where keys are, if it holds none. Raises ValueError."""
    if not all(KEY.fullmatch(source) for source in value or ()):
        raise ValueError("an entry says where a key is, never the key: write env:NAME, file:PATH or sha256: and 64 hex digits")
    return value


def _section(kind: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    for part in path:
        if isinstance(part, str) and part in kind.model_fields:  # else a name of the file's own, as that of a tenant
            kind = _model(kind.model_fields[part].annotation) or kind
    return kind


def _model(annotation: Any) -> type[BaseModel] | None:
    """The section in an annotation: `Buckets`, `Buckets | None`, `list[Buckets]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model(part)) is not None), None)


def _short(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "nothing"}[value]
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a number beyond any size"
    if isinstance(value, Mapping | list | tuple | set):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
