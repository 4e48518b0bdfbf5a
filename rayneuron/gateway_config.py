"""Every word the `args` of a gateway may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from rayneuron.config import KEY, Deployment
from rayneuron.config import parse as parse_model
from rayneuron.errors import ConfigError
from rayneuron.validation import Locate, Section, validate


def _sources(value: list[str] | None) -> list[str] | None:
    if not all(KEY.fullmatch(source) for source in value or ()):
        raise ValueError("an entry says where a key is, never the key: write env:NAME, file:PATH or sha256: and 64 hex digits")
    return value


class Listed(Section):
    """One model behind the gateway."""

    application: str = Field(min_length=1, description="The application of this file that serves it.")
    args: dict[str, Any] | None = Field(
        None, description="Its args once more, as a YAML anchor gives them: the application's own. Default: its replicas are asked."
    )


class Tenant(Section):
    """Whose keys are whose, and how much of the fleet is theirs."""

    keys: list[str] = Field(min_length=1, description="Where their keys are: env:NAME, file:PATH (one a line) or sha256:HEX.")
    weight: float = Field(1.0, gt=0, description="Their share where others wait too.")
    tier: int = Field(0, description="Lower goes first, whatever the weights.")
    max_running: int | None = Field(None, ge=1, description="Sequences of theirs that run at once.")
    max_waiting: int | None = Field(None, ge=1, description="Sequences of theirs that may wait; more: 429.")

    @field_validator("keys")
    @classmethod
    def _no_key_itself(cls, value: list[str]) -> list[str] | None:
        return _sources(value)


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

    @field_validator("api_keys")
    @classmethod
    def _no_key_itself(cls, value: list[str] | None) -> list[str] | None:
        return _sources(value)


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

    limit: int = Field(3, ge=0, description="How often one request may go on elsewhere.")
    strikes: int = Field(2, ge=1, description="Replicas that may fail at the same token of a request before it is given up.")
    hold_s: float = Field(30.0, ge=0, description="How long it waits where no replica is there.")


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

    @property
    def default(self) -> str | None:
        """The application, or another name of the model, that a body without `model` means."""
        return self.default_model or (self.models[0].application if len(self.models) == 1 else None)

    @model_validator(mode="after")
    def _consistent(self) -> GatewayConfig:
        names = [member.application for member in self.models]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"models: the application {twice} stands there twice; leave one of them out")
        return self


def parse(args: Mapping[str, Any] | GatewayConfig, place: Locate = lambda path, text: "") -> GatewayConfig:
    """Check the `args` of a gateway. Raises ConfigError naming every wrong key by its path and the nearest right name."""
    return args if isinstance(args, GatewayConfig) else validate(GatewayConfig, args, place)


def check(gateway: GatewayConfig, applications: Mapping[str, Deployment], routes: Mapping[str, str | None]) -> None:
    """Hold a gateway against the applications of its file. Raises ConfigError; its `param` says where."""
    names: dict[str, str] = {}
    for i, listed in enumerate(gateway.models):
        name = listed.application
        own = applications.get(name)
        if own is None:
            there = ", ".join(applications)
            raise ConfigError(f"no application here is called {name}; there are: {there}", param=f"models.{i}.application")
        key = None if listed.args is None else drift(parse_model(listed.args), own)
        if key is not None:
            said = f"models.{i}.args.{key} is not what the application {name} says; write the same, or leave args out"
            raise ConfigError(said, param=f"models.{i}.args.{key}")
        for word in (name, *own.model.served_names):
            if names.setdefault(word, name) != name:
                raise ConfigError(f"{names[word]} and {name} both answer to {word}; give one another model.name", param=f"models.{i}")
        if gateway.tenants and routes[name] and not own.serving.api_keys:
            raise ConfigError(
                f"tenants do not hold at {routes[name]}, {name}'s own route, which asks for no key; write route_prefix: null there, or its"
                " serving.api_keys",
                param="tenants",
            )
    if gateway.default_model is not None and gateway.default_model not in names:
        raise ConfigError(f"default_model {gateway.default_model} is none of: {', '.join(names)}", param="default_model")


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
