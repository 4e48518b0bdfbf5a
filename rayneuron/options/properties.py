"""serving.properties, and the variables of LMI's container: which of them says what, by their precedence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rayneuron.errors import ConfigError
from rayneuron.options import adapters, lmi
from rayneuron.options.words import Translation, tell

FILE = "serving.properties"
ROWS = 32  # LMI's default batch
ADDRESS = {"http_options.host": "0.0.0.0", "http_options.port": 8080}
_PAIR = re.compile(r"((?:\\.|[^\\=:\s])+)\s*(?:[=:]\s*|\s+|$)(.*)", re.S)
_NEURON = ("neuronx", "tnx", "nxdi", "neuron")


def read(text: str, name: str = FILE) -> dict[str, tuple[str, int]]:
    """A file of Java properties: key -> (value, line). Raises ConfigError for a key that stands twice."""
    found: dict[str, tuple[str, int]] = {}
    for line, number in _lines(text):
        match = _PAIR.fullmatch(line)
        if match is None:
            raise ConfigError(f"{name}:{number}: is not KEY=VALUE: {line[:60]!r}")
        key, value = (re.sub(r"\\(.)", r"\1", part) for part in match.groups())
        if key in found:
            raise ConfigError(f"{name}:{number}: {key} stands here and in line {found[key][1]}; leave one of them out", param=key)
        found[key] = value.strip(), number
    return found


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """Logical lines: a backslash at the end goes on, # and ! begin a comment."""
    joined, first = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.lstrip()
        if not joined and (not line or line[0] in "#!"):
            continue
        first = first if joined else number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            joined += line[:-1]
            continue
        yield joined + line, first
        joined = ""
    if joined:
        yield joined, first


def told(folder: Path | None, variables: Mapping[str, str]) -> Translation:
    """A folder with serving.properties, or the variables alone. Raises ConfigError, with file, line and key.

    What the file says goes before the variables: HF_*, then OPTION_*, then those that other containers have.
    """
    options: dict[str, tuple[str, str]] = {}
    server: dict[str, tuple[str, str]] = {}
    if folder is not None:
        _from_file(folder / FILE, options, server)
    _from_environment(variables, options, server)
    out = Translation()
    tell(out, lmi.SERVER, {k: v for k, (v, _) in server.items()}, lambda name: server[name][1], "LMI's server")
    tell(out, lmi.OPTIONS, {k: v for k, (v, _) in options.items()}, lambda name: options[name][1], "LMI")
    if out.assigned.get("lora.enabled"):
        said, where = options.get("adapters", (None, str(folder)))
        if found := adapters.beside(folder, said):
            out.default(adapters.MODULES, found, where)
    if folder is not None:
        out.default("model.path", str(folder), str(folder))
    if "model.path" not in out.assigned:
        raise ConfigError("no model is named; write option.model_id in serving.properties, or set HF_MODEL_ID")
    here = "LMI's default"
    if any(word in value for value, _ in options.values() for word in _NEURON):
        out.default("device", "neuron", here)
    for key, value in {"max_num_seqs": ROWS, "model.any_name": True, **ADDRESS}.items():
        out.default(key, value, here)
    return out


def _from_file(path: Path, options: dict[str, tuple[str, str]], server: dict[str, tuple[str, str]]) -> None:
    try:
        pairs = read(path.read_text("utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no {FILE} in {path.parent}; write one with option.model_id=, or name its folder") from None
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"{path} cannot be read: {wrong}") from None
    for key, (value, line) in pairs.items():
        where = f"{path}:{line}"
        if key.startswith("option."):
            options[key.removeprefix("option.")] = value, where
        else:
            server[key] = value, where


def _from_environment(variables: Mapping[str, str], options: dict[str, tuple[str, str]], server: dict[str, tuple[str, str]]) -> None:
    for name, key in lmi.HUB_VARIABLES.items():
        if variables.get(name):
            options.setdefault(key, (variables[name], name))
    for name, value in variables.items():
        if name.startswith("OPTION_") and value:
            key = name.removeprefix("OPTION_")
            key = key.lower() if re.fullmatch("[A-Z0-9_]+", key) else key
            key = "entryPoint" if key == "entrypoint" else key
            (server if key == "engine" else options).setdefault(key, (value, name))
    for name, key in lmi.VARIABLES.items():
        if variables.get(name):
            options.setdefault(key, (variables[name], name))
    for name, key in lmi.SERVER_VARIABLES.items():
        if variables.get(name):
            server.setdefault(key, (variables[name], name))
