"""README.md tells the truth: its commands are CI's and the command line's, its reference is the schema, its files exist.

`python -m tests.test_readme` writes the generated parts anew.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rayneuron import cli
from rayneuron.config import Deployment
from tests.test_structure import package_modules, tree

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def package_tree() -> str:
    """Every module with the first line of its docstring."""
    return f"```\n{tree(package_modules())}\n```"


def reference() -> str:
    """Every key of a deployment's args: name, type, default, meaning."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{key}` | {value} | {default} | {meaning} |" for key, value, default, meaning in _keys(Deployment, "")]
    return "\n".join(rows)


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


GENERATED = {"tree": package_tree, "reference": reference}


def part(text: str, name: str) -> tuple[str, str, str]:
    """What stands before, in, and after the generated part of that name."""
    start, end = f"<!-- {name}: python -m tests.test_readme -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = text.partition(start)
    inside, _, after = rest.partition(end)
    return before + start, inside, end + after


def code_blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_parts_are_current(name: str) -> None:
    assert part(README.read_text(), name)[1] == GENERATED[name](), "run: python -m tests.test_readme"


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


def write() -> None:
    text = README.read_text()
    for name, make in GENERATED.items():
        before, _, after = part(text, name)
        text = before + make() + after
    README.write_text(text)


if __name__ == "__main__":
    write()
