"""A deployment file: a Ray Serve config whose applications are ours, read, overridden, checked and written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayneuron import config
from rayneuron.errors import ConfigError

IMPORT_PATH = "rayneuron.serve.app:build"
ALL = "all"


@dataclass(frozen=True, slots=True)
class DeploymentFile:
    """The whole Serve config as plain data, and our applications in it: name -> checked deployment."""

    content: Mapping[str, Any]
    deployments: Mapping[str, config.Deployment]


def read(path: Path, assignments: Mapping[str, Any] | None = None, application: str | None = None) -> DeploymentFile:
    """Read and check a file, with dotted keys of one application's args set to other values first.

    `application` names it where the file has several, ALL means each of them. Raises ConfigError for a file or key that is wrong.
    """
    content = _content(path)
    ours = [entry for entry in content["applications"] if entry.get("import_path") == IMPORT_PATH]
    if not ours:
        raise ConfigError(f"{path} has no application with import_path: {IMPORT_PATH}")
    if assignments:
        for target in ours if application == ALL else [_only(ours, application, path)]:
            target["args"] = config.override(target.get("args") or {}, assignments)
    return DeploymentFile(content, {_name(entry): _parsed(entry, path) for entry in ours})


def parse_assignments(words: list[str]) -> dict[str, Any]:
    """["model.path=/tiny", "max_num_seqs=4"] to {dotted key: value}, the value read as YAML."""
    import yaml

    out = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key.strip("."):
            raise ConfigError(f"--set {word!r} is not KEY=VALUE; write for example --set model.path=demo:random:tiny")
        try:
            out[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {word!r}: the value is not valid YAML; put it in quotes") from None
    return out


def _content(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    entries = content.get("applications") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path} is not a Ray Serve config: it needs `applications:`, a list of entries with name, import_path and args")
    return {**content, "applications": entries}


def _only(entries: list[dict[str, Any]], name: str | None, path: Path) -> dict[str, Any]:
    chosen = [entry for entry in entries if name is None or _name(entry) == name]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(_name(entry) for entry in entries)
    raise ConfigError(f"{path} holds the applications {names}; say which one with --application NAME, or {ALL}")


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name", "default"))


def _parsed(entry: Mapping[str, Any], path: Path) -> config.Deployment:
    try:
        return config.parse(entry.get("args") or {})
    except ConfigError as error:
        raise ConfigError(f"{path}, application {_name(entry)}: {error.message}", param=error.param) from None
