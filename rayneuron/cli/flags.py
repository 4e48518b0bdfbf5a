"""Every key of a deployment file as a flag, under its own name or vLLM's, and a parser that says the nearest where there is none."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

WORDS = {"true": True, "false": False, "null": None}
WIDTH, HELP_AT = 120, 40
ABOUT = (
    "A flag is a key of a deployment file: in it dots, dashes and underscores are the same. A switch needs no "
    "value, and --no-KEY is --KEY false. A value is what YAML would say; more words of a list follow each other."
)


class FlagParser(argparse.ArgumentParser):
    """In a flag, dots, dashes and underscores are the same; a switch needs no value, and --no-KEY is --KEY false."""

    def __init__(self, *args: Any, **options: Any) -> None:
        shape = {"formatter_class": lambda prog: argparse.HelpFormatter(prog, max_help_position=HELP_AT, width=WIDTH)}
        super().__init__(*args, **{**shape, "allow_abbrev": False, **options})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """As argparse's, but nothing is left unknown."""
        found, rest = super().parse_known_args(self._spelled(sys.argv[1:] if args is None else list(args)), namespace)
        if rest and rest[0].startswith("-"):
            from rayneuron.validation import nearest

            name = rest[0].partition("=")[0]
            self.error(f"unknown flag {name}{nearest(name, [flag for flag in self._option_string_actions if flag.startswith('--')])}")
        if rest:
            self.error(f"{rest[0]!r} is one word too many; flags begin with --")
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, which of a wrong command lists all there are."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from rayneuron.validation import nearest

            raise argparse.ArgumentError(None, f"unknown command {value!r}{nearest(value, list(action.choices))}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")

    def _spelled(self, words: list[str]) -> list[str]:
        out = []
        for i, word in enumerate(words):
            name, sign, value = word.partition("=")
            if not name.startswith("--") or name == "--":
                out.append(word)
                continue
            name = "--" + re.sub(r"[._]", "-", name[2:])
            off, action = f"--{name[5:]}", self._option_string_actions.get(name)
            if action is None and name.startswith("--no-") and isinstance(self._option_string_actions.get(off), KeyFlag):
                name, sign, value = off, "=", "false"
            elif isinstance(action, KeyFlag) and action.switch and not sign and words[i + 1 : i + 2] not in (["true"], ["false"], ["null"]):
                sign, value = "=", "true"
            out.append(name + sign + value)
        return out


SHORT = {"tensor_parallel_size": ("-tp",), "pipeline_parallel_size": ("-pp",), "data_parallel_size": ("-dp",)}  # vLLM's


class KeyFlag(argparse.Action):
    """One key of a deployment file: `args.said` holds {what it means here, dotted: value}, `args.options` which flag said so.

    `switch`: true or false, and true where no value stands beside it.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, field: FieldInfo | None, switch: bool = False, **options: Any) -> None:
        kind, self.nullable = _kind(field.annotation) if field is not None else (Any, True)
        self.name, self.kind, self.switch = dest, kind, kind is bool or switch
        many = get_origin(kind) is list
        options.setdefault("metavar", _metavar(kind))
        super().__init__(option_strings, argparse.SUPPRESS, nargs="+" if many else None, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        """Take one flag. Ends the program where vLLM's name is refused."""
        from rayneuron import aliases
        from rayneuron.errors import ConfigError

        value = self._value(values)
        try:
            means = aliases.meaning(self.name, value) if self.name in aliases.NAMES else {self.name: value}
        except ConfigError as wrong:
            parser.error(wrong.message.replace(self.name, f"{option}", 1))
        namespace.said = {**getattr(namespace, "said", {}), **means}
        namespace.options = {**getattr(namespace, "options", {}), **{key: option for key in means}}

    def _value(self, values: Any) -> Any:
        """What was written as the key's own kind; what is of none is left to be refused where every wrong value is."""
        if isinstance(values, list):
            words = [part for word in values for part in ([word] if word.startswith(("[", "{")) else word.split(","))]
            read = [self._value(word) for word in words]
            if len(read) == 1 and (read[0] is None or (self.kind == list[int] and isinstance(read[0], str))):
                return read[0]  # null, or a word that stands for a list
            return [one for part in read for one in (part if isinstance(part, list) else [part])]
        if values in WORDS and (values != "null" or self.nullable) and (self.kind is not str or values == "null"):
            return WORDS[values]
        if self.kind is str or get_origin(self.kind) is Literal or (get_origin(self.kind) is list and not values.startswith("[")):
            return values if self.kind != list[int] or not values.lstrip("-").isdigit() else int(values)
        try:
            return json.loads(values)
        except ValueError:
            return _yaml(values)


def add(command: argparse.ArgumentParser, *, whole: bool = True) -> None:
    """A flag for every key of a deployment file; `whole`: for http_options too."""
    from rayneuron import aliases
    from rayneuron.config import Deployment
    from rayneuron.serve_config import HttpOptions
    from rayneuron.validation import fields

    keys = dict(fields(Deployment)) | (dict(fields(HttpOptions, "http_options.")) if whole else {})
    groups: dict[str, Any] = {}
    for key, field in keys.items():
        if key in ("model", "lmi"):  # arguments of their own
            continue
        section = key.rpartition(".")[0]
        if section not in groups:
            groups[section] = command.add_argument_group(f"{section}: keys" if section else "keys of a deployment file")
        said = (field.description or "").replace("%", "%%")
        groups[section].add_argument(_flag(key), dest=key, action=KeyFlag, field=field, help=said)
    theirs = command.add_argument_group("vLLM's names, which mean the same", "What has no meaning here is refused with the reason.")
    for name in aliases.NAMES:
        ours = aliases.means(name)
        if _flag(name) not in command._option_string_actions and (whole or not str(ours).startswith("http_options.")):
            like = "model.aliases" if name == "served_model_name" else "" if name in aliases.TRANSLATED else str(ours)
            switch = ours is None and all(isinstance(value, bool) for value in aliases.GIVEN.get(name, ()))
            words: dict[str, Any] = {"help": ours or argparse.SUPPRESS, "field": keys.get(like), "switch": switch}
            theirs.add_argument(*SHORT.get(name, ()), _flag(name), dest=name, action=KeyFlag, **words)


def _flag(key: str) -> str:
    return "--" + re.sub(r"[._]", "-", key)


def _kind(annotation: Any) -> tuple[Any, bool]:
    """The one kind of an annotation (Any where it is none in particular), and whether null is one too."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not NoneType]
        lists = [part for part in parts if get_origin(part) is list]
        kind = _kind(parts[0])[0] if len(parts) == 1 else lists[0] if lists else Any
        return kind, NoneType in get_args(annotation)
    return annotation, False


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(str(word) for word in get_args(kind))
    if get_origin(kind) is list:
        return "N" if get_args(kind)[0] is int else "TEXT"
    return {int: "N", float: "NUMBER", str: "TEXT", bool: "true|false"}.get(kind, "{...}")


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
