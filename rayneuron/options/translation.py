"""Whatever option files there are, as one deployment file of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayneuron import deployment_file, yaml_file
from rayneuron.deployment_file import DeploymentFile
from rayneuron.errors import ConfigError
from rayneuron.options import nxdi, properties, ray_llm
from rayneuron.options.words import Translation

NXDI = "neuron_config.json"


Translated = tuple[DeploymentFile, list[str]]


def lmi(folder: Path | None, variables: Mapping[str, str], assigned: Mapping[str, Any], options: Mapping[str, str]) -> Translated:
    """What a container of LMI would serve from this folder, and these variables; `assigned` goes before both."""
    return _made(properties.told(folder, variables), assigned, options)


def read(path: Path) -> Translated:
    """A folder or file of one of the other systems, and what is to be known of it. Raises ConfigError."""
    if path.name == properties.FILE and path.is_file():
        path = path.parent
    if path.is_dir() and (path / properties.FILE).is_file():
        return lmi(path, {}, {}, {})
    config = path / NXDI if path.is_dir() else path
    if config.name.endswith(".json") and config.is_file():
        told = nxdi.told(_json(config), str(config))
        told.default("model.path", str(config.parent), str(config))
        return _made(told, {}, {})
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return _ray(path)
    raise ConfigError(f"{path} holds neither {properties.FILE} nor {NXDI}, and is no YAML of ray.serve.llm; name one of these")


def _made(told: Translation, assigned: Mapping[str, Any], options: Mapping[str, str]) -> Translated:
    said = {**told.assigned, **assigned}
    origins = {**told.origins, **dict.fromkeys(assigned, ""), **options}
    return deployment_file.made(str(said["model.path"]), said, {key: where for key, where in origins.items() if where}), told.notes


def _ray(path: Path) -> Translated:
    models = ray_llm.told(yaml_file.content(path)[0], str(path))
    first, notes = _made(models[0][2], {}, {})
    entries = []
    for name, route, told in models:
        file, said = _made(told, {}, {})
        entries.append({**file.content["applications"][0], "name": name, "route_prefix": route})
        notes += said if told is not models[0][2] else []
    return deployment_file.of({**first.content, "applications": entries}, path), notes


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as wrong:
        raise ConfigError(f"{path} cannot be read as JSON: {wrong}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold an object")
    return found
