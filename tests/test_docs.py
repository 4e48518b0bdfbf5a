"""The documents tell the truth: commands are CI's and the command line's, the reference is the schema, rooms and files exist.

`python -m tests.test_docs` writes docs/reference.md anew.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rayneuron import cli
from rayneuron.config import Deployment
from tests.test_structure import package_modules

ROOT = Path(__file__).resolve().parent.parent
README, ARCHITECTURE, REFERENCE = ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "docs" / "reference.md"


def reference() -> str:
    """Every key of a deployment's args: name, type, default, meaning."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{key}` | {value} | {default} | {meaning} |" for key, value, default, meaning in _keys(Deployment, "")]
    return "\n".join(rows)


def document() -> str:
    """docs/reference.md."""
    return f"# Keys of a deployment file\n\n`args` of an application; written by `python -m tests.test_docs`.\n\n{reference()}\n"


def _keys(kind: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
            continue
        if field.default is PydanticUndefined:
            default = "required" if field.default_factory is None else ""
        else:
            default = (
                "" if field.default is None else f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
            )
        yield prefix + name, _words(field.annotation), default, (field.description or "").replace("|", "\\|")


def _words(annotation: object) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(str(word) for word in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_words(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is list:
        return f"list of {_words(get_args(annotation)[0])}"
    names = {str: "text", int: "whole number", float: "number", bool: "true, false"}
    return names.get(annotation, "mapping") if isinstance(annotation, type) else "mapping"


def code_blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def test_the_reference_is_the_schema() -> None:
    assert REFERENCE.read_text() == document(), "run: python -m tests.test_docs"


def test_the_architecture_names_every_room_and_nothing_else() -> None:
    text = ARCHITECTURE.read_text()
    rooms = {f"{module.unit}/" for module in package_modules() if "/" in module.path}
    assert set(re.findall(r"^\| `(\w+/)` \|", text, re.M)) == rooms and len(text.splitlines()) <= 100
    for path in set(re.findall(r"`([\w/]+\.(?:py|md|yaml))`", text)):
        assert (ROOT / path).is_file() or list((ROOT / "rayneuron").rglob(path)), path


def test_the_two_commands_come_first_and_ci_runs_the_second() -> None:
    first, second = (block for _, block in code_blocks(README.read_text())[:2])
    assert "&& rayneuron serve deployments/smollm2.yaml" in first and first.count("\n") == second.count("\n") == 1
    assert second == (ROOT / ".ci" / "run").read_text().splitlines(keepends=True)[-1]


def test_every_command_and_file_it_names_exists() -> None:
    text = README.read_text()
    (commands,) = [action.choices for action in cli._parser()._actions if action.dest == "command"]
    shown = set(re.findall(r"^\| `rayneuron ([a-z-]+)", text, re.M))
    assert shown == set(commands), "the table of commands is the command line's"
    for path in re.findall(r"\b((?:deployments|examples|tests|cluster|rayneuron)/[\w/.-]+\.\w+)", text):
        assert (ROOT / path).is_file() or "{" in path, path


if __name__ == "__main__":
    REFERENCE.write_text(document())
