"""Model families by `model_type`: one row a name. Adding a family is one file here, one row, and one golden test."""

from __future__ import annotations

import difflib
from importlib import import_module
from types import ModuleType
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models.arch import Arch
from rayneuron.models.hub import Config

FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
}


def family(config: dict[str, Any]) -> ModuleType:
    """The family's file. Raises CheckpointError with the nearest known `model_type`."""
    name = config.get("model_type")
    if name not in FAMILIES:
        near = difflib.get_close_matches(str(name), FAMILIES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CheckpointError(f"model_type {name!r} is not supported; {hint}supported: {', '.join(sorted(FAMILIES))}")
    return import_module(f"rayneuron.models.{FAMILIES[name]}")


def architecture(config: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json. `max_model_len` matters to longrope alone. Raises CheckpointError naming a missing key."""
    return family(config).arch(Config(config), max_model_len)
