"""config.json and the files beside it: read, with what is missing or unsupported named; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayneuron.errors import CheckpointError


class Config(dict[str, Any]):
    """config.json; a missing key says so by name."""

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"config.json of a {self.get('model_type', '?')} model lacks {key!r}")


def refuse(config: Mapping[str, Any], **settings: Any) -> None:
    """Raise CheckpointError where config.json has one of these values, which nothing here computes."""
    for name, value in settings.items():
        if config.get(name) == value:
            raise CheckpointError(f"config.json sets {name}: {value!r}, which is not supported for {config.get('model_type')} models")


def either(config: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of `names` that config.json has."""
    return next((config[n] for n in names if config.get(n) is not None), None) or config[names[0]]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (ValueError, OSError) as e:
        raise CheckpointError(f"{path} cannot be read as JSON: {e}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def read_config(path: str | Path) -> dict[str, Any]:
    """The raw config.json of a model directory."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a model directory; give a local folder with config.json and safetensors files")
    return read_json(directory / "config.json")


def generation_config(path: str | Path) -> dict[str, Any]:
    """generation_config.json, {} where there is none."""
    file = Path(path) / "generation_config.json"
    return read_json(file) if file.exists() else {}
