"""A deployment file: a Ray Serve config whose applications are ours, read, overridden, checked and written again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rayneuron import aliases, config, gateway_config, group_config, serve_config, yaml_file
from rayneuron.errors import ConfigError, RayNeuronError
from rayneuron.validation import KeyPath, dotted, override, validate

IMPORT_PATH = "rayneuron.serve.app:build"
GATEWAY_PATH = "rayneuron.gateway.app:build"
DEPLOYMENT, PREFILL = "EngineServer", "PrefillServer"  # what the Serve deployments of our applications are called; the latter of pools
GATEWAY, ARBITER = "Gateway", "Arbiter"  # and those of a gateway; the latter where there is a host
ALL = "all"
PROXIES = {  # what the files of deployments/ say to Serve's proxies too
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "rayneuron.serve.ending:middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
}
MOST_LETTERS = 1000  # of what is said of one value


@dataclass(frozen=True, slots=True)
class DeploymentFile:
    """The whole Serve config as plain data, and our applications in it: name -> checked deployment, and gateways in front of them.

    `lines`: where each key stands.
    """

    path: Path | str
    content: Mapping[str, Any]
    deployments: Mapping[str, config.Deployment]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    assigned: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    gateways: Mapping[str, gateway_config.GatewayConfig] = field(default_factory=dict)

    def located(self, name: str, error: RayNeuronError) -> RayNeuronError:
        """What is wrong with an application, said with its name and the line of the key that it is about; or with a model of a host."""
        index = next((i for i, entry in enumerate(self.content["applications"]) if _name(entry) == name), None)
        if index is None:
            return type(error)(f"{self.path}: {name}, a model of the host: {error.message}", param=error.param)
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

    @property
    def hosted(self) -> dict[str, config.Deployment]:
        """Models that may sleep on the host of a gateway."""
        return {name: gateway_config.hosted_model(gateway, name) for gateway in self.gateways.values() for name in gateway.hosted}

    def filled(self) -> dict[str, Any]:
        """The content with every default of our applications' args written out: a file that can be served."""
        ours = {name: _filled(made) for name, made in self.deployments.items()}
        ours |= {name: made.model_dump() for name, made in self.gateways.items()}
        entries = [{**e, "args": ours[name]} if (name := _name(e)) in ours else e for e in self.content["applications"]]
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
    return _checked(path, *yaml_file.content(path), _Assigned(assignments or {}, options or {}), application)


def made(model: str, assignments: Mapping[str, Any], options: Mapping[str, str]) -> DeploymentFile:
    """The file that serves one model at / of this machine alone, with these keys set. Raises ConfigError."""
    name = assignments.get("model.name")
    served = config.Model.model_construct(path=model, name=name).served_name
    if not served:
        raise ConfigError(f"{model!r} names no model; write a directory, org/name of a hub, s3://bucket/prefix or demo:smollm2")
    entry = {"name": served, "route_prefix": "/", "import_path": IMPORT_PATH}
    content = {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "controller_options": {"runtime_env": {"env_vars": dict(PROXIES)}},
        "applications": [{**entry, "args": {"model": {"path": model}}}],
    }
    return _checked(model, content, {}, _Assigned(assignments, options), None)


def of(content: dict[str, Any], path: Path) -> DeploymentFile:
    """A file of ours from its content; `path` is where that came from. Raises ConfigError."""
    return _checked(path, content, {}, _Assigned({}, {}), None)


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
    sleepers = _sleepers(listed)
    for name, member in sleepers.items():
        if inside and (application in (name, ALL) or (application is None and not ours and len(sleepers) == 1)):
            member["args"] = _overridden(member["args"], inside)
    if inside and (ours or sleepers) and application not in sleepers:
        for i in ours if application == ALL else [_only(listed, ours, application, path, sleepers)] if ours or len(sleepers) > 1 else []:
            if isinstance(listed[i].get("args"), dict | None):
                listed[i]["args"] = _overridden(listed[i].get("args") or {}, inside)
                assigned[i] = {key: inside.option(key) for key in inside}
                _repeat(listed, _name(listed[i]), inside)

    def place(keys: KeyPath, text: str) -> str:
        return f"{whole.option(dotted(keys))}: " if dotted(keys) in whole else _place(path, lines, assigned, keys, text)

    validate(serve_config.File, content, place)
    for i, entry in enumerate(listed):
        if (said := entry["import_path"]).startswith("rayneuron.") and said not in (IMPORT_PATH, GATEWAY_PATH):
            at = _place(path, lines, assigned, ("applications", i, "import_path"), "") + f"application {_name(entry)}: "
            raise ConfigError(f"{at}import_path {said} is none of rayneuron's; write {IMPORT_PATH}, or {GATEWAY_PATH} for a gateway")
    if not ours and not sleepers:
        raise ConfigError(f"{path} has no application with import_path: {IMPORT_PATH}")
    file = DeploymentFile(path, content, {}, lines, assigned)
    file = DeploymentFile(path, content, {_name(listed[i]): _parsed(file, i) for i in ours}, lines, assigned)
    return replace(file, gateways={_name(e): _gateway(file, i) for i, e in enumerate(listed) if e.get("import_path") == GATEWAY_PATH})


def _translate(path: Path | str, entry: dict[str, Any], keys: KeyPath, lines: dict[KeyPath, int]) -> None:
    """vLLM's names in the args of an application become ours, which then stand in their lines."""
    if not isinstance(entry.get("args"), dict):
        return
    try:
        entry["args"], spelled = aliases.translate(entry["args"])
    except ConfigError as wrong:
        said = f"application {entry.get('name', 'default')}: {wrong.message}"
        raise ConfigError(_place(path, lines, {}, (*keys, *(wrong.param or "").split(".")), "") + said, param=wrong.param) from None
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


def _gateway(file: DeploymentFile, index: int) -> gateway_config.GatewayConfig:
    """The args of a gateway, checked by themselves and against the applications of the file."""
    entry, base = file.content["applications"][index], ("applications", index, "args")

    def place(keys: KeyPath, text: str) -> str:
        return _place(file.path, file.lines, file.assigned, (*base, *keys), text) + f"application {_name(entry)}: "

    made = gateway_config.parse(entry.get("args") or {}, place)
    names = (GATEWAY,) if made.host is None else (GATEWAY, ARBITER)
    for i, changed in enumerate(entry.get("deployments") or ()):
        at = _place(file.path, file.lines, file.assigned, (*base[:2], "deployments", i), "") + f"application {_name(entry)}: "
        if changed["name"] not in names:
            raise ConfigError(f"{at}has no deployment {changed['name']!r}; write name: {' or '.join(names)}")
        if changed.get("user_config") is not None:
            raise ConfigError(f"{at}a gateway has no user_config; leave it out, or write it at the application of a model")
    try:
        gateway_config.check(made, file.deployments, {_name(e): e.get("route_prefix", "/") for e in file.content["applications"]})
    except ConfigError as wrong:
        keys = tuple(int(part) if part.isdigit() else part for part in (wrong.param or "").split("."))
        raise ConfigError(f"{place(keys, '')}{wrong.message}", param=wrong.param) from None
    return made


def _sleepers(listed: list[Any]) -> dict[str, dict[str, Any]]:
    """The models of hosts, as gateways list them, by name."""
    gateways = [e for e in listed if isinstance(e, dict) and e.get("import_path") == GATEWAY_PATH]
    members = [m for e in gateways for m in _members(e) if isinstance(m, dict)]
    return {str(m["name"]): m for m in members if "name" in m and isinstance(m.get("args"), dict)}


def _members(entry: Any) -> list[Any]:
    """What a gateway lists, where it is a list; what is wrong with it else is said when it is checked."""
    args = entry.get("args")
    members = args.get("models") if isinstance(args, dict) else None
    return members if isinstance(members, list) else []


def _repeat(listed: list[Any], name: str, inside: _Assigned) -> None:
    """What is set in an application's args is set where a gateway repeats them."""
    for entry in listed:
        for member in _members(entry) if isinstance(entry, dict) and entry.get("import_path") == GATEWAY_PATH else ():
            if isinstance(member, dict) and member.get("application") == name and isinstance(member.get("args"), dict):
                member["args"] = _overridden(member["args"], inside)


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name", "default"))


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


def _filled(deployment: config.Deployment) -> dict[str, Any]:
    made = deployment.model_dump()
    if deployment.pools is not None:
        made["pools"]["prefill"] = group_config.prefill_of(deployment).model_dump(exclude={"pools", "model"})
    return made


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return entry.get("import_path") == IMPORT_PATH


def _only(entries: list[dict[str, Any]], ours: list[int], name: str | None, path: Path | str, more: Iterable[str] = ()) -> int:
    chosen = [i for i in ours if name is None or entries[i].get("name", "default") == name]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join([*(str(entries[i].get("name", "default")) for i in ours), *more])
    raise ConfigError(f"{path} holds the applications {names}; say which one with --application NAME, or {ALL}")
