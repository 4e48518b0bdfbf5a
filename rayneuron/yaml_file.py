"""A YAML file as plain data, and the line of every key in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayneuron import serve_config
from rayneuron.errors import ConfigError
from rayneuron.validation import KeyPath

MOST_KEYS = 100_000  # values of a file


def content(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Read a Serve config. Raises ConfigError."""
    import yaml

    lines: dict[KeyPath, int] = {}
    try:
        text = path.read_text("utf-8")
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                _number(node, (), lines, path)
            content = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}{f':{mark.line + 1}' if mark else ''}: cannot be read as YAML: {error.problem}") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict) or "applications" not in content:
        known = list(serve_config.File.model_fields)
        near = [key for key in content if str(key).lower().startswith("appl")] if isinstance(content, dict) else []
        hint = f"; did you mean applications where it says {near[0]}?" if near and known else ""
        raise ConfigError(
            f"{path} is not a Ray Serve config: it needs `applications:`, a list of entries with name, import_path and args{hint}"
        )
    return content, lines


def _number(node: Any, keys: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    """The line of every key below `node`. Raises ConfigError for a key that stands twice in one mapping, or a list that holds itself."""
    import yaml

    if keys not in lines:
        lines[keys] = node.start_mark.line + 1
    if len(lines) > MOST_KEYS:
        raise ConfigError(f"{path} holds more than {MOST_KEYS} values, aliases included; no deployment file does")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _number(item, (*keys, index), lines, path)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path}:{line}: a key must be a word, not a list or mapping")
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise ConfigError(f"{path}:{line}: {key.value} stands here and in line {seen[key.value]}; leave one of them out")
            seen[str(key.value)] = line
            inner = (*keys, key.value)
            lines[inner] = line
            _number(value, inner, lines, path)
