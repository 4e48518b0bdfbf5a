"""Every symbol of the SDK that is used: our code uses only recorded ones, the stand-in has their parameters, and so has the real source.

RAYNEURON_NXD names the `src` folder of a neuronx-distributed checkout, RAYNEURON_NXD_GIT a clone of it (bare or not) with its history;
without them the checks against the real source are skipped. The clone proves that no admitted release needs ModelBuilder v1.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
from pathlib import Path

import pytest

from rayneuron.devices.neuron import releases, sdk
from tests.devices.neuron.symbols import CLOSED, FORWARD_MODES, SYMBOLS, Symbol

ROOT = Path(__file__).resolve().parents[3]
SOURCE = os.environ.get("RAYNEURON_NXD")
CLONE = os.environ.get("RAYNEURON_NXD_GIT")
# Releases as the clone has them. SDK 2.31's neuronx-distributed 0.19 was not published as source.
REVISIONS = {"2.26": ("v2.26.0", "0.15"), "2.27": ("v2.27.0", "0.16"), "2.28": ("v2.28.0", "0.17"), "2.29": ("HEAD", "0.18")}


def spelled(arguments: ast.arguments) -> tuple[str, ...]:
    """Parameter names of a definition, without self and cls; * before keyword-only and variadic ones, as in the table."""
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [f"*{a.arg}" for a in arguments.kwonlyargs]
    return (*names, *([f"**{arguments.kwarg.arg}"] if arguments.kwarg else []))


def definition(source: str, symbol: Symbol) -> ast.FunctionDef | None:
    """The function that defines a symbol's parameters."""
    body = ast.parse(source).body
    path = [symbol.owner, symbol.name] if symbol.owner else [symbol.name]
    for part in path:
        found = next((n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part), None)
        if found is None:
            return None
        if isinstance(found, ast.FunctionDef):
            return found
        body = found.body
    return next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)


def file_of(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".py")


def test_only_recorded_symbols_are_imported() -> None:
    recorded = {(s.module, s.name) for s in SYMBOLS if not s.owner} | set(CLOSED)
    assert {(module, name) for name, module in sdk._SYMBOLS.items()} <= recorded


def test_only_recorded_methods_and_arguments_are_called() -> None:
    """Calls on the SDK's objects in our sources, by method and keyword."""
    known = {s.name: {p.lstrip("*") for p in s.parameters} for s in SYMBOLS}
    free = {"forward": {"model_name", "forward_mode"}}
    seen = set()
    for path in ("sdk.py", "pipeline.py", "device.py"):
        for node in ast.walk(ast.parse((ROOT / "rayneuron" / "devices" / "neuron" / path).read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = _called(node.func)
            if name in known:
                seen.add(name)
                assert {k.arg for k in node.keywords if k.arg} <= known[name] | free.get(name, set()), ast.unparse(node)
    used = {s.name for s in SYMBOLS if s.module.endswith((".functions", ".hlo_utils"))}
    assert used | {"NxDModel", "add", "save", "load", "set_weights", "to_neuron", "forward", "NxDParallelState"} <= seen


def _called(function: ast.expr) -> str:
    """model.forward(...) -> forward; sdk["NxDModel"].load(...) -> load; sdk["trace"](...) -> trace."""
    owners = ("made", "model", "self._model", "sdk['NxDModel']")
    if isinstance(function, ast.Attribute) and ast.unparse(function.value) in owners:
        return function.attr
    if isinstance(function, ast.Subscript) and isinstance(function.slice, ast.Constant) and "sdk" in ast.unparse(function.value):
        return str(function.slice.value)
    return ""


def test_the_modes_used_exist() -> None:
    text = (ROOT / "rayneuron" / "devices" / "neuron" / "device.py").read_text()
    assert set(re.findall(r'"(async|ranked|default|ranked_to_cpu)"', text)) <= set(FORWARD_MODES)


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda s: s.dotted)
def test_the_stand_in_has_the_same_parameters(symbol: Symbol) -> None:
    found = definition(file_of(ROOT / "tests" / "devices" / "neuron" / "standin", symbol.module).read_text(), symbol)
    assert found is not None
    if symbol.name == "forward":
        assert spelled(found.args) == symbol.parameters
    else:
        assert spelled(found.args) == symbol.parameters


def test_the_stand_in_has_what_is_closed(standin: Path) -> None:
    for module, name in CLOSED:
        found = getattr(importlib.import_module(module), name)
        assert inspect.isfunction(found) or inspect.isfunction(found.apply)


@pytest.mark.skipif(SOURCE is None, reason="RAYNEURON_NXD names no neuronx-distributed source")
@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda s: s.dotted)
def test_the_real_source_has_these_parameters(symbol: Symbol) -> None:
    found = definition(file_of(Path(SOURCE or ""), symbol.module).read_text(), symbol)
    assert found is not None and spelled(found.args) == symbol.parameters


@pytest.mark.skipif(SOURCE is None, reason="RAYNEURON_NXD names no neuronx-distributed source")
def test_the_real_source_has_these_modes_and_calls() -> None:
    folder = Path(SOURCE or "")
    text = file_of(folder, "neuronx_distributed.trace.nxd_model.nxd_model").read_text()
    assert set(FORWARD_MODES) == set(re.findall(r"'(\w+)'", text[text.index("SUPPORTED_FORWARD_MODES = ") :].split("\n")[0]))
    used = "".join(p.read_text() for p in (folder / "neuronx_distributed").rglob("*.py"))
    assert all(re.search(rf"from {module}(\.\w+)* import .*\b{name}\b", used) for module, name in CLOSED)


def shown(revision: str, module: str) -> str | None:
    """A module's source in the clone at a revision, None where it does not exist."""
    path = "src/" + "/".join(module.split(".")) + ".py"
    ran = subprocess.run(["git", "-C", str(CLONE), "show", f"{revision}:{path}"], capture_output=True, text=True, check=False)
    return ran.stdout if ran.returncode == 0 else None


@pytest.mark.skipif(CLONE is None, reason="RAYNEURON_NXD_GIT names no clone of neuronx-distributed")
@pytest.mark.parametrize("sdk", REVISIONS)
def test_every_admitted_release_has_all_that_is_used(sdk: str) -> None:
    """So there is nothing for a fallback to ModelBuilder v1 to do; and 2.26, which would need one, is refused."""
    revision, version = REVISIONS[sdk]
    assert version in (shown(revision, "neuronx_distributed._version") or shown(revision, "neuronx_distributed.version") or "")
    missing = []
    for symbol in SYMBOLS:
        source = shown(revision, symbol.module)
        found = definition(source, symbol) if source is not None else None
        if found is None or spelled(found.args) != symbol.parameters:
            missing.append(symbol)
    admitted = tuple(map(int, version.split("."))) in releases.RELEASES
    assert admitted is not any(s.since == "2.27" for s in missing), [s.dotted for s in missing]
    if admitted:
        assert not missing
    model = shown(revision, "neuronx_distributed.trace.nxd_model.nxd_model") or ""
    assert not admitted or {"ranked", "async"} <= set(
        re.findall(r"'(\w+)'", model[model.index("SUPPORTED_FORWARD_MODES = ") :].split("\n")[0])
    )
