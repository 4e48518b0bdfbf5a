"""Every word the `args` of a gateway may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from rayneuron import host_config
from rayneuron.config import Deployment
from rayneuron.config import parse as parse_model
from rayneuron.errors import ConfigError
from rayneuron.validation import Locate, Section, no_key_itself, validate

NOBODY = "default"  # the account of a key that is nobody's in particular, and of calls without one


class Listed(Section):
    """One model behind the gateway."""

    application: str | None = Field(None, min_length=1, description="The application of this file that serves it.")
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$", description="Or the name of a model of the host, which may sleep.")
    args: dict[str, Any] | None = Field(
        None, description="Of a model of the host: its args. Else the application's own once more, as a YAML anchor gives them."
    )
    pinned: bool = Field(False, description="Of the host: never put to sleep, nor made to go.")
    min: int = Field(0, ge=0, description="Of the host: seats it always has.")
    max: int = Field(1, ge=1, description="Of the host: the most it may have.")
    priority: int = Field(0, description="Of the host: one of more makes one of less go, whatever that is worth.")
    idle_s: float = Field(300.0, gt=0, description="Of the host: nobody has asked for so long: it is put to sleep.")
    weight: float = Field(1.0, gt=0, description="Of the host: how much its waiting counts.")

    @property
    def title(self) -> str:
        """What the gateway calls it."""
        return self.application or self.name or ""

    @property
    def deployment(self) -> Deployment | None:
        """Of a model of the host: how it is served."""
        return None if self.name is None else parse_model(self.args or {})

    @model_validator(mode="after")
    def _one_owner(self) -> Listed:
        if (self.application is None) == (self.name is None):
            raise ValueError("write application: NAME (of this file), or name: NAME with args (a model of the host)")
        if self.name is not None and self.args is None:
            raise ValueError(f"{self.name} has no args; write those of its model, as an application of rayneuron.serve.app:build has them")
        if self.min > self.max:
            raise ValueError(f"min {self.min} and max {self.max} must not descend")
        of_host = ("pinned", "min", "max", "priority", "idle_s", "weight")
        said = [key for key in of_host if getattr(self, key) != type(self).model_fields[key].default]
        if self.application is not None and said:
            raise ValueError(f"{', '.join(said)} is for models of the host; {self.application} says serving.autoscaling itself")
        return self


class Tenant(Section):
    """Whose keys are whose, and how much of the fleet is theirs."""

    keys: list[str] = Field(min_length=1, description="Where their keys are: env:NAME, file:PATH (one a line) or sha256:HEX.")
    weight: float = Field(1.0, gt=0, description="Their share where others wait too.")
    tier: int = Field(0, description="Lower goes first, whatever the weights.")
    max_running: int | None = Field(None, ge=1, description="Sequences of theirs that run at once.")
    max_waiting: int | None = Field(None, ge=1, description="Sequences of theirs that may wait; more: 429.")

    _no_key_itself = field_validator("keys")(no_key_itself)


class GatewayServing(Section):
    """How Ray Serve runs the gateway, and who may call it."""

    replicas: int = Field(1, ge=1, description="Gateways; one a node with a proxy is enough.")
    num_cpus: float = Field(0.5, ge=0, description="CPUs each reserves in Ray.")
    drain_timeout_s: float = Field(600.0, gt=0, description="How long a stopping gateway may finish its streams.")
    api_keys: list[str] | None = Field(
        None, min_length=1, description="Keys of nobody in particular: env:NAME, file:PATH or sha256:HEX. Default: none is asked for."
    )
    allowed_origins: list[str] = Field(default_factory=list, description='Origins whose pages may call it (CORS), or ["*"]; default: none.')
    page: bool = Field(True, description="Serve the chat page at /.")
    reset_prefix_cache: bool = Field(False, description="Let clients empty the prefix caches: POST /reset_prefix_cache.")
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="The longest body of a request; a model's own limit holds beside it.")
    body_timeout_s: float = Field(60.0, gt=0, description="For a request's body to arrive; beyond, 408.")

    _no_key_itself = field_validator("api_keys")(no_key_itself)


class Routing(Section):
    """When a request goes to a replica."""

    admit_ms: float = Field(200.0, gt=0, description="It is sent while a replica would begin it so soon; else it waits in fair order.")
    session_ttl_s: float = Field(600.0, ge=0, description="How long a session (x-session-id) is expected where it was before.")


class Admission(Section):
    """Who may wait for a replica."""

    max_wait_s: float = Field(30.0, gt=0, description="Whoever would wait longer, by prediction, is told 429 and when to come again.")
    max_queue_tokens: int | None = Field(1_000_000, ge=1, description="Prompt tokens that may wait.")


class Replays(Section):
    """What becomes of a request whose replica is lost."""

    limit: int = Field(3, ge=0, description="How often one request may go on elsewhere; replicas that leave in order are not counted.")
    strikes: int = Field(2, ge=1, description="Replicas that may fail at the same token of a request before it is given up.")
    hold_s: float = Field(30.0, ge=0, description="How long it waits while no replica takes any, and one is expected.")


class GatewayConfig(Section):
    """The `args` of the application of a gateway."""

    models: list[Listed] = Field(min_length=1, description="The models behind it.")
    default_model: str | None = Field(None, min_length=1, description="Whom a body without `model` means; default: the only one.")
    any_name: bool = Field(False, description="Answer whatever model a client names, by the default one.")
    explain: bool = Field(False, description="Say in a header of every reply where it came from, and why from there.")
    serving: GatewayServing = GatewayServing.model_construct()
    tenants: dict[str, Tenant] = Field(default_factory=dict, description="Accounts, by name.")
    routing: Routing = Routing.model_construct()
    admission: Admission = Admission.model_construct()
    replay: Replays = Replays.model_construct()
    host: host_config.HostSection | None = Field(None, description="Whose cores models may sleep and wake on.")
    scaling: host_config.Scaling = host_config.Scaling.model_construct()

    @property
    def hosted(self) -> dict[str, Listed]:
        """Models that may sleep, by name."""
        return {listed.title: listed for listed in self.models if listed.name is not None}

    @property
    def key_sources(self) -> dict[str, tuple[str, list[str]]]:
        """Where the keys of each account are, behind the key that says so."""
        own = {name: (f"tenants.{name}.keys", tenant.keys) for name, tenant in self.tenants.items()}
        return own | ({NOBODY: ("serving.api_keys", self.serving.api_keys)} if self.serving.api_keys else {})

    @property
    def default(self) -> str | None:
        """The application, or another name of the model, that a body without `model` means."""
        return self.default_model or (self.models[0].title if len(self.models) == 1 else None)

    @model_validator(mode="after")
    def _consistent(self) -> GatewayConfig:
        names = [member.title for member in self.models]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"models: the application {twice} stands there twice; leave one of them out")
        if self.any_name and self.default is None:
            raise ValueError("any_name is answered by the default model, and of several none is; write default_model")
        if NOBODY in self.tenants and self.serving.api_keys:
            raise ValueError(f"serving.api_keys are of the account {NOBODY}; write them as tenants.{NOBODY}.keys, or rename that tenant")
        if self.host is not None and not self.hosted:
            raise ValueError("host is for models that may sleep, and none is listed; write name: NAME with args, or leave it out")
        if self.hosted and self.host is None:
            raise ValueError(f"models: {next(iter(self.hosted))} may sleep, and no host has cores for it; write host: {{instance: TYPE}}")
        return self


def parse(args: Mapping[str, Any] | GatewayConfig, place: Locate = lambda path, text: "") -> GatewayConfig:
    """Check the `args` of a gateway. Raises ConfigError naming every wrong key by its path and the nearest right name."""
    return args if isinstance(args, GatewayConfig) else validate(GatewayConfig, args, place)


def check(gateway: GatewayConfig, applications: Mapping[str, Deployment], routes: Mapping[str, str | None]) -> None:
    """Hold a gateway against the applications of its file. Raises ConfigError; its `param` says where."""
    names: dict[str, str] = {}
    sleepers = {name: hosted_model(gateway, name) for name in gateway.hosted}
    for i, listed in enumerate(gateway.models):
        name = listed.title
        own = sleepers.get(name) or applications.get(name)
        if own is None or (name in sleepers and name in applications):
            there = ", ".join(applications)
            said = "no application here is" if own is None else "an application here is also"
            raise ConfigError(f"{said} called {name}; there are: {there}", param=f"models.{i}.application")
        key = None if listed.args is None or name in sleepers else drift(parse_model(listed.args), own)
        if key is not None:
            said = f"models.{i}.args.{key} is not what the application {name} says; write the same, or leave args out"
            raise ConfigError(said, param=f"models.{i}.args.{key}")
        for word in (name, *own.model.served_names):
            if names.setdefault(word, name) != name:
                raise ConfigError(f"{names[word]} and {name} both answer to {word}; give one another model.name", param=f"models.{i}")
        if name not in sleepers and own.serving.autoscaling is not None and not own.serving.autoscaling.min_replicas:
            raise ConfigError(
                f"{name} may have no replica (serving.autoscaling.min_replicas: 0), and a gateway wakes none; write 1 there, or list it"
                " as a model of the host",
                param=f"models.{i}.application",
            )
        if gateway.tenants and routes.get(name) and not own.serving.api_keys:
            raise ConfigError(
                f"tenants do not hold at {routes[name]}, {name}'s own route, which asks for no key; write route_prefix: null there, or its"
                " serving.api_keys",
                param="tenants",
            )
    if gateway.default_model is not None and gateway.default_model not in names:
        raise ConfigError(f"default_model {gateway.default_model} is none of: {', '.join(names)}", param="default_model")


def hosted_model(gateway: GatewayConfig, name: str) -> Deployment:
    """The deployment of a model of the host, on an instance as the host's are. Raises ConfigError; its `param` says where."""
    index = next(i for i, listed in enumerate(gateway.models) if listed.name == name)
    said = gateway.models[index].args or {}

    def wrong(key: str, what: str) -> ConfigError:
        return ConfigError(f"{name}, a model of the host: {what}", param=f"models.{index}.args.{key}")

    assert gateway.host is not None
    try:
        made = parse_model({"instance": gateway.host.instance, **said})
    except ConfigError as error:
        raise wrong(error.param or "model", error.message) from None
    if made.instance != gateway.host.instance:
        raise wrong("instance", f"instance {made.instance} is not the host's; write {gateway.host.instance}, or leave it out")
    for key, good in (("nodes", 1), ("pipeline_parallel", 1), ("pools", None)):
        if getattr(made, key) != good:
            raise wrong(key, f"{key} is for models with an application of their own; leave it out, or give it one")
    for key in ("autoscaling", "num_replicas"):
        if getattr(made.serving, key) is not None:
            raise wrong(f"serving.{key}", f"serving.{key} is the host's to decide; write min and max beside args")
    listed = gateway.models[index]
    if made.few_graphs and not (listed.pinned or listed.min) and not (made.compile.required or made.compile.artifact):
        what = "it may sleep, and would compile for minutes where it wakes; write compile.required: true after `rayneuron compile`"
        raise wrong("compile.required", f"{what}, or compile.artifact")
    if made.serving.seat is not None:
        raise wrong("serving.seat", "serving.seat is the host's to write; leave it out")
    return made


def drift(said: Deployment, own: Deployment) -> str | None:
    """The first key, dotted, in which two say different things; None where they mean the same."""
    return _difference(said.model_dump(), own.model_dump(), "")


def _difference(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str) -> str | None:
    for key in dict.fromkeys((*one, *other)):
        mine, theirs = one.get(key), other.get(key)
        if mine != theirs:
            inside = isinstance(mine, Mapping) and isinstance(theirs, Mapping)
            return _difference(mine, theirs, f"{prefix}{key}.") if inside else f"{prefix}{key}"  # type: ignore[arg-type]
    return None
