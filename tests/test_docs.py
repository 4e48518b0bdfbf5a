"""What is written about the code is true of it: the rooms of ARCHITECTURE.md, the reference, README.md, and every file named anywhere.

`python -m tests.test_docs` writes docs/reference.md anew.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rayneuron import aliases, cli, settings
from rayneuron.cli import flags
from rayneuron.config import Deployment, HotSettings, parse, parse_hot
from rayneuron.devices.neuron import releases
from rayneuron.gateway_config import GatewayConfig
from tests.test_structure import MAY_IMPORT

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rayneuron"
README, ARCHITECTURE, REFERENCE = ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "docs" / "reference.md"
DOCS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(p for top in ("docs", "examples", "rayneuron", "tests") for p in (ROOT / top).rglob("*.md")))
    if ".venv" not in path.parts
)
DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))
SOURCES = sorted(path for top in ("rayneuron", "examples", "tests") for path in (ROOT / top).rglob("*.py"))

# docs/reference.md


def reference() -> str:
    """docs/reference.md: keys of deployment files, variables, commands."""
    return "\n".join(["# Reference", "", "Written by `python -m tests.test_docs` from the code; do not edit.", "", *_parts()])


def _parts() -> Iterator[str]:
    hot = " and ".join(f"`{name}`" for name in HotSettings.model_fields)
    yield "## Keys of a deployment file\n"
    yield (
        "These stand under `args` of an application with `import_path: rayneuron.serve.app:build`; what is not here is refused with the "
        f"nearest name.\n{hot} may also stand under `user_config`, and change without a restart.\n"
        "[deployments.md](deployments.md) says more of some. No default: none, or what the meaning says.\n"
    )
    yield from _keys(Deployment, "Top level")
    yield "## Keys of a gateway\n"
    yield "These stand under `args` of an application with `import_path: rayneuron.gateway.app:build`; `tenants.X` is account X's.\n"
    yield from _keys(GatewayConfig, "Top level of a gateway")
    yield "## Names of vLLM\n"
    yield (
        "Each may stand where our key may: on the command line (`--tensor-parallel-size 2`), under `args`, and as a keyword of `LLM`.\n"
        "Both names of one thing are refused. Those of `http_options` are for the command line.\n"
    )
    yield table(("vLLM", "here"), [(f"`{name}`", f"`{ours}`") for name in aliases.NAMES if (ours := aliases.means(name)) is not None])
    yield "These are refused, save where their value says how it is here anyway:\n"
    yield _refused(aliases.REFUSED)
    yield "And of those within `speculative_config`:\n"
    yield _refused(aliases.DRAFTS)
    yield "## Environment variables\n"
    yield table(("variable", "meaning"), list(_variables()))
    taken = ", ".join(f"`{name}`" for name in releases.PREFERENCES)
    yield (
        f"Of what the Neuron runtime reads, these are kept where the operator has set them: {taken}.\n"
        f"What contradicts the compiled graphs, and `{releases.CC_FLAGS}`, is refused; the rest is replaced, and the log says so.\n"
    )
    yield "## Commands\n"
    yield "`--help` and `-h` are everywhere; `rayneuron --version` prints the version.\n"
    for name, parser in _commands().items():
        yield f"### rayneuron {name}\n\n{_help(name)}\n"
        keys = [a for a in parser._actions if isinstance(a, flags.KeyFlag)]
        rows = [(f"`{' '.join(_spelled(a))}`", a.help or "") for a in parser._actions if a.dest != "help" and a not in keys]
        if keys:
            rows.append(("`--KEY VALUE`", "every key above, or vLLM's name: `--limits-max-waiting 3`, `--tensor-parallel-size 2`"))
        if rows:
            yield table(("argument", "meaning"), rows)


def _refused(reasons: Mapping[str, str]) -> str:
    """Names by why they are refused."""
    by: dict[str, list[str]] = {}
    for name, why in reasons.items():
        by.setdefault(why.removeprefix("is refused: "), []).append(f"`{name}`")
    return table(("vLLM", "why"), [(", ".join(names), why) for why, names in by.items()])


def _keys(top: type[BaseModel], title: str) -> Iterator[str]:
    for prefix, kind in _sections(top, ""):
        yield f"### {prefix or title}\n\n{kind.__doc__}\n"
        rows = [(f"`{prefix}.{n}`" if prefix else f"`{n}`", *_key(f)) for n, f in kind.model_fields.items() if _section(f) is None]
        yield table(("key", "value", "default", "meaning"), rows)


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section of a key, of each entry of its list, or of each of its names."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _sections(kind: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield name, kind
    for key, field in kind.model_fields.items():
        inner = _section(field)
        if inner is not None:
            yield from _sections(inner, f"{name}.{key}".strip("."))


def _key(field: FieldInfo) -> tuple[str, str, str]:
    """The values, the default and the meaning of one key."""
    default = "required" if field.is_required() else ""
    if field.default is not PydanticUndefined and field.default not in (None, "", []):
        default = f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
    return _bounded(_words(field.annotation), field.metadata), default, field.description or ""


def _words(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _bounded(_words(get_args(annotation)[0]), getattr(get_args(annotation)[1], "metadata", []))
    if get_origin(annotation) is Literal:
        return ", ".join(str(word) for word in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_words(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is list:
        return f"list of {_words(get_args(annotation)[0])}"
    names = {str: "text", int: "whole number", float: "number", bool: "true, false"}
    return names.get(annotation, "mapping") if isinstance(annotation, type) else "mapping"


def _bounded(words: str, metadata: list[Any]) -> str:
    if "number" not in words:
        return words
    said = {"ge": "from {}", "gt": "above {}", "le": "to {}"}
    found = [text.format(getattr(m, name)) for m in metadata for name, text in said.items() if hasattr(m, name)]
    return " ".join([words, *found])


def _variables() -> Iterator[tuple[str, str]]:
    """Every variable that settings.py reads by a name of its own, with what its function says."""
    for function in ast.parse(Path(settings.__file__).read_text()).body:
        if isinstance(function, ast.FunctionDef):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get"]
            names = [call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)]
            if names:
                yield ", ".join(f"`{name}`" for name in names), " ".join((ast.get_docstring(function) or "").split())


def _commands() -> dict[str, argparse.ArgumentParser]:
    (commands,) = [action for action in cli._parser()._actions if action.dest == "command"]
    return dict(commands.choices)  # type: ignore[arg-type]


def _help(name: str) -> str:
    (commands,) = [action for action in cli._parser()._actions if action.dest == "command"]
    said = next(action.help for action in commands._choices_actions if action.dest == name)  # type: ignore[attr-defined]
    return f"{said[0].upper()}{said[1:]}."


def _spelled(action: argparse.Action) -> Iterator[str]:
    yield from action.option_strings[:1]
    if action.nargs != 0:
        yield str(action.metavar or action.dest.upper())


def test_the_reference_is_current() -> None:
    assert REFERENCE.read_text() == reference(), "run: python -m tests.test_docs"


def test_every_key_variable_and_argument_says_what_it_means() -> None:
    unsaid = re.compile(r"^\| `(.*)\|  \|$", re.M)
    assert unsaid.findall(table(("argument", "meaning"), [("`--out DIR`", "")])) == ["--out DIR` "]
    assert unsaid.findall(reference()) == []


@pytest.mark.parametrize(
    "said",
    [
        "### serving.autoscaling\n",
        "| `limits.max_waiting` | whole number from 0 | `256` | Sequences",
        "| `model.path` | text | required |",
        "| `block_size` | whole number from 1 |  |",
        "| `RAYNEURON_LEDGER` |",
        "| `--instance TYPE` |",
        "| `MODEL\\|FILE.yaml` |",
        "| `tensor_parallel_size` | `tensor_parallel` |",
        "| `enforce_eager`",
    ],
)
def test_the_reference_holds(said: str) -> None:
    assert said in reference()


# README.md


def code_blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def test_the_two_commands_come_first_and_ci_runs_the_second() -> None:
    first, second = (block for _, block in code_blocks(README.read_text())[:2])
    assert "&& rayneuron serve demo:smollm2\n" in first and first.count("\n") == second.count("\n") == 1
    assert second == (ROOT / ".ci" / "run").read_text().splitlines(keepends=True)[-1]


def test_the_table_of_commands_is_the_command_line() -> None:
    assert set(re.findall(r"^\| `rayneuron ([a-z-]+)", README.read_text(), re.M)) == set(_commands())


def test_the_readme_leads_to_every_page() -> None:
    text = README.read_text()
    for page in (ARCHITECTURE, *(ROOT / "docs").glob("*.md")):
        assert f"]({page.relative_to(ROOT)})" in text, page


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"https?:", target):
            name, _, anchor = target.partition("#")
            found = (page.parent / name).resolve() if name else page
            assert found.exists(), f"{target} is not there"
            assert not anchor or anchor in _anchors(found.read_text()), f"{target} has no such heading"


def _anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_yaml_it_shows_is_accepted() -> None:
    shown = [yaml.safe_load(block) for page in DOCS for language, block in code_blocks(page.read_text()) if language == "yaml"]
    assert [key for part in shown for key in part] == ["applications", "user_config", "serving"]
    for part in shown:
        parse_hot(part.get("user_config"))
        parse({"model": {"path": "/m"}, "serving": part.get("serving", {})})
        for application in part.get("applications", ()):
            parse(application["args"])


# ARCHITECTURE.md


def folders() -> set[str]:
    """Every folder of the package that holds something, as `engine/`, `devices/cpu/`."""
    held = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    return {f"{folder}/" for folder in held if folder.parts}


def rooms() -> list[tuple[str, str]]:
    """The table of rooms: (`engine/`, what it holds) in order."""
    section = ARCHITECTURE.read_text().partition("\n## Rooms\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+/)` \| (.*) \|$", section, re.M)


def test_the_architecture_is_short() -> None:
    assert ARCHITECTURE.read_text().count("\n") <= 100


def test_its_rooms_are_the_packages() -> None:
    assert sorted(room for room, _ in rooms()) == sorted(folder for folder in folders() if folder.count("/") == 1)


def test_every_folder_inside_a_room_is_mentioned() -> None:
    holds = dict(rooms())
    for folder in folders():
        room, _, inner = folder.partition("/")
        assert not inner or f"`{inner}`" in holds[f"{room}/"], f"{folder} is not mentioned beside {room}/"


def test_a_room_imports_only_rooms_above_it() -> None:
    seen: set[str] = set()
    for name in (room.rstrip("/") for room, _ in rooms()):
        needed = {unit.split(".")[0] for unit in MAY_IMPORT.get(name, ())} & {folder.rstrip("/") for folder in folders()}
        assert needed <= seen | {name}, f"{name}/ stands above {', '.join(sorted(needed - seen - {name}))}"
        seen.add(name)


def test_its_words_for_files_are_files() -> None:
    """Names without an ending: the root files, and what stands between backticks with a slash."""
    text = ARCHITECTURE.read_text()
    (row,) = re.findall(r"^\| root files \| (.*) \|$", text, re.M)
    for word in re.findall(r"`(\w+)`", row):
        assert (PACKAGE / f"{word}.py").is_file(), word
    for word in re.findall(r"`([\w/]+/)`", text):
        bases = (ROOT, PACKAGE, *(PACKAGE / room for room in ("devices", "api", "engine", "serve")))
        assert any((base / word).is_dir() for base in bases), word


# Every file that is named anywhere

ENDINGS = "py|md|yaml|txt|jsonl|toml|cpp|c|h|js|html|css|sh"
PATH = re.compile(rf"(?<![\w/.{{}}*$~:-])((?:[\w.-]+/)+[\w.-]+\.(?:{ENDINGS}))\b(?![\w/{{(])")
BARE = re.compile(rf"`([\w-]+\.(?:{ENDINGS}))`")
PLACEHOLDER = re.compile(r"NAME|DEPLOYMENT|FILE|\bDIR\b")
ELSEWHERE = {
    "rayneuron/models/aurora.py",  # the family that examples/add_a_model.md has its reader write
}


def named(text: str) -> set[str]:
    """Paths in a text, and file names between backticks."""
    return {found for found in (*PATH.findall(text), *BARE.findall(text)) if not PLACEHOLDER.search(found)} - ELSEWHERE


def exists(path: str, page: Path) -> bool:
    """A path is meant from the root, from the package or from the page that names it; a bare name is a file below the page's folder."""
    if "/" in path:
        return any((base / path).is_file() for base in (ROOT, PACKAGE, PACKAGE / "devices", ROOT / "examples" / "bench", page.parent))
    inside = page.parent if page.parent != ROOT / "docs" else ROOT
    tops = (inside / top for top in ("rayneuron", "tests", "examples", "docs")) if inside == ROOT else (inside,)
    return (ROOT / path).is_file() or any(True for top in tops for _ in top.rglob(path))


def prose(path: Path) -> str:
    """What a Python file says in comments and docstrings."""
    source = path.read_text()
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join([*comments, *(ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))])


def missing(text: str, page: Path) -> list[str]:
    return [f"{page.relative_to(ROOT)} names {path}" for path in sorted(named(text)) if not exists(path, page)]


@pytest.mark.parametrize("page", [*DOCS, *DEPLOYMENTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_a_page_names_is_there(page: Path) -> None:
    assert missing(page.read_text(), page) == []


def test_every_file_that_comments_and_docstrings_name_is_there() -> None:
    native = [path for ending in ("*.c", "*.cpp", "*.h") for path in PACKAGE.rglob(ending)]
    found = [line for path in SOURCES for line in missing(prose(path), path)]
    found += [line for path in native for line in missing(re.sub(r"(?m)^#include.*$", "", path.read_text()), path)]
    assert not found, "\n" + "\n".join(found)


def test_a_file_that_is_not_there_is_found() -> None:
    text = "See `neuron_gone.py`, devices/gone.py and tests/engine/test_fuzz.py, not `NAME.yaml`, /models/x.py nor https://a.b/c.md."
    assert missing(text, PACKAGE / "devices" / "README.md") == [
        "rayneuron/devices/README.md names devices/gone.py",
        "rayneuron/devices/README.md names neuron_gone.py",
    ]


if __name__ == "__main__":
    REFERENCE.parent.mkdir(exist_ok=True)
    REFERENCE.write_text(reference())
