"""A deployment file: a Ray Serve config whose applications are ours, read, overridden, checked and written again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayneuron import aliases, config, group_config, serve_config
from rayneuron.errors import ConfigError, RayNeuronError
from rayneuron.validation import KeyPath, dotted, override, validate

IMPORT_PATH = "rayneuron.serve.app:build"
DEPLOYMENT, PREFILL = "EngineServer", "PrefillServer"  # what the Serve deployments of our applications are called; the latter of pools
ALL = "all"
PROXIES = {  # what the files of deployments/ say to Serve's proxies too
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "rayneuron.serve.ending:middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
}
MOST_KEYS, MOST_LETTERS = 100_000, 1000  # values of a file; letters of what is said of one


@dataclass(frozen=True, slots=True)
class DeploymentFile:
    """The whole Serve config as plain data, and our applications in it: name -> checked deployment. `lines`: where each key stands."""

    path: Path | str
    content: Mapping[str, Any]
    deployments: Mapping[str, config.Deployment]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    assigned: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def located(self, name: str, error: RayNeuronError) -> RayNeuronError:
        """What is wrong with an application, said with its name and the line of the key that it is about."""
        index = next(i for i, entry in enumerate(self.content["applications"]) if entry.get("name", "default") == name)
        param = tuple(error.param.split(".")) if error.param else ()
        where = _place(self.path, self.lines, self.assigned, ("applications", index, "args", *param), error.message)
        said = " ".join(error.message.split())
        said = said if len(said) < MOST_LETTERS else f"{said[: MOST_LETTERS // 2]} ..."
        return type(error)(f"{where}application {name}: {said}", param=error.param)

    @property
    def pools(self) -> dict[str, config.Deployment]:
        """All that is to be placed: our applications, and the prefill pools of those that have one."""
        there = {f"{name} prefill": group_config.prefill_of(one) for name, one in self.deployments.items() if one.pools is not None}
        return {**self.deployments, **there}

    def filled(self) -> dict[str, Any]:
        """The content with every default of our applications' args written out: a file that can be served."""
        ours = {name: _filled(deployment) for name, deployment in self.deployments.items()}
        entries = [{**e, "args": ours[e.get("name", "default")]} if _is_ours(e) else e for e in self.content["applications"]]
        return {**self.content, "applications": entries}


def read(
    path: Path,
    assignments: Mapping[str, Any] | None = None,
    application: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DeploymentFile:
    """Read and check a file, with dotted keys of one application's args, or of http_options, set to other values first.

    `application` names it where the file has several, ALL means each of them. `options`: how a key was set, where not by --set. Raises
    ConfigError for a file or key that is wrong, with its line.
    """
    return _checked(path, *_content(path), _Assigned(assignments or {}, options or {}), application)


def made(model: str, assignments: Mapping[str, Any], options: Mapping[str, str]) -> DeploymentFile:
    """The file that serves one model at / of this machine alone, with these keys set. Raises ConfigError."""
    name = assignments.get("model.name")
    entry = {"name": config.Model.model_construct(path=model, name=name).served_name, "route_prefix": "/", "import_path": IMPORT_PATH}
    content = {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "controller_options": {"runtime_env": {"env_vars": dict(PROXIES)}},
        "applications": [{**entry, "args": {"model": {"path": model}}}],
    }
    return _checked(model, content, {}, _Assigned(assignments, options), None)


class _Assigned(dict[str, Any]):
    """Dotted keys set to values, and the option that set each."""

    def __init__(self, values: Mapping[str, Any], options: Mapping[str, str]) -> None:
        super().__init__(values)
        self._options = options

    def option(self, key: str) -> str:
        return self._options.get(key, f"--set {key}")

    def split(self) -> tuple[_Assigned, _Assigned]:
        """Those of the whole file, and those of an application's args."""
        whole = {key: value for key, value in self.items() if key.startswith("http_options.")}
        return _Assigned(whole, self._options), _Assigned({k: v for k, v in self.items() if k not in whole}, self._options)


def _checked(
    path: Path | str, content: dict[str, Any], lines: dict[KeyPath, int], assignments: _Assigned, application: str | None
) -> DeploymentFile:
    whole, inside = assignments.split()
    assigned: dict[int, Mapping[str, str]] = {}
    entries = content.get("applications")
    listed = entries if isinstance(entries, list) else []
    ours = [i for i, entry in enumerate(listed) if isinstance(entry, dict) and _is_ours(entry)]
    for i in ours:
        _translate(path, listed[i], ("applications", i, "args"), lines)
    content = _overridden(content, whole)
    if inside and ours:
        for i in ours if application == ALL else [_only(listed, ours, application, path)]:
            if isinstance(listed[i].get("args"), dict | None):
                listed[i]["args"] = _overridden(listed[i].get("args") or {}, inside)
                assigned[i] = {key: inside.option(key) for key in inside}

    def place(keys: KeyPath, text: str) -> str:
        return f"{whole.option(dotted(keys))}: " if dotted(keys) in whole else _place(path, lines, assigned, keys, text)

    validate(serve_config.File, content, place)
    if not ours:
        raise ConfigError(f"{path} has no application with import_path: {IMPORT_PATH}")
    file = DeploymentFile(path, content, {}, lines, assigned)
    return DeploymentFile(path, content, {listed[i].get("name", "default"): _parsed(file, i) for i in ours}, lines, assigned)


def _translate(path: Path | str, entry: dict[str, Any], keys: KeyPath, lines: dict[KeyPath, int]) -> None:
    """vLLM's names in the args of an application become ours, which then stand in their lines."""
    if not isinstance(entry.get("args"), dict):
        return
    try:
        entry["args"], spelled = aliases.translate(entry["args"])
    except ConfigError as wrong:
        said = f"application {entry.get('name', 'default')}: {wrong.message}"
        raise ConfigError(_place(path, lines, {}, (*keys, wrong.param or ""), "") + said, param=wrong.param) from None
    for ours, theirs in spelled.items():
        lines[keys + tuple(ours.split("."))] = lines.get((*keys, theirs), 0)


def parse_assignments(words: list[str]) -> dict[str, Any]:
    """["model.path=/tiny", "max_num_seqs=4"] to {dotted key: value}, the value read as YAML; vLLM's names become ours."""
    import yaml

    out: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not all(key.split(".")):
            raise ConfigError(f"--set {word!r} is not KEY=VALUE; write for example --set model.path=demo:random:tiny")
        try:
            read = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(f"--set {word!r}: the value is not valid YAML; put it in quotes") from None
        out |= aliases.meaning(key, read) if key in aliases.NAMES else {key: read}
    return out


def _overridden(args: Mapping[str, Any], assignments: _Assigned) -> dict[str, Any]:
    for key, value in assignments.items():
        try:
            args = override(args, {key: value})
        except ConfigError as wrong:
            raise ConfigError(f"{assignments.option(key)}: {wrong.message}") from None
    return dict(args)


def _parsed(file: DeploymentFile, index: int) -> config.Deployment:
    """The args of one application, and what overrides its deployment, checked."""
    entry = file.content["applications"][index]
    base: KeyPath = ("applications", index)
    said = f"application {entry.get('name', 'default')}: "

    def place(inside: KeyPath) -> Any:
        return lambda keys, text: _place(file.path, file.lines, file.assigned, (*base, *inside, *keys), text) + said

    made = config.parse(entry.get("args") or {}, place(("args",)))
    for i, changed in enumerate(entry.get("deployments") or ()):
        names = (DEPLOYMENT,) if made.pools is None else (DEPLOYMENT, PREFILL)
        if changed["name"] not in names:
            wanted = f"has no deployment {changed['name']!r}; write name: {' or '.join(names)}"
            raise ConfigError(place(("deployments", i, "name"))((), "") + wanted)
        config.parse_hot(changed.get("user_config"), place(("deployments", i, "user_config")))
    return made


def _place(path: Path | str, lines: Mapping[KeyPath, int], assigned: Mapping[int, Mapping[str, str]], keys: KeyPath, text: str) -> str:
    """ "FILE:LINE: ", or the option that set the key. What is said of a whole section is looked up by the first key it names."""
    options = assigned.get(int(keys[1]), {}) if keys[2:3] == ("args",) else {}
    below = [full for full in lines if len(full) > len(keys) and full[: len(keys)] == keys]
    inside = {".".join(map(str, full[start:])): full for start in (3, len(keys)) for full in below if isinstance(full[-1], str)}
    if inside or keys not in lines:
        known = {**inside, **{option: (*keys[:3], *option.split(".")) for option in options}}
        keys = next((known[word] for word in re.findall(r"\w+(?:\.\w+)*", text) if word in known), keys)
    named = ".".join(map(str, keys[3:]))
    for key, option in options.items():
        if named == key or named.startswith(f"{key}."):
            return f"{option}: "
    while keys and keys not in lines:
        keys = keys[:-1]
    return f"{path}:{lines[keys]}: " if keys in lines else f"{path}: "


def _content(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
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


def _filled(deployment: config.Deployment) -> dict[str, Any]:
    made = deployment.model_dump()
    if deployment.pools is not None:
        made["pools"]["prefill"] = group_config.prefill_of(deployment).model_dump(exclude={"pools", "model"})
    return made


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return entry.get("import_path") == IMPORT_PATH


def _only(entries: list[dict[str, Any]], ours: list[int], name: str | None, path: Path | str) -> int:
    chosen = [i for i in ours if name is None or entries[i].get("name", "default") == name]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(str(entries[i].get("name", "default")) for i in ours)
    raise ConfigError(f"{path} holds the applications {names}; say which one with --application NAME, or {ALL}")
