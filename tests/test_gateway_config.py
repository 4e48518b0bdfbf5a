"""A gateway in a deployment file: what it may say, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayneuron import deployment_file, gateway_config, preflight
from rayneuron.config import Deployment
from rayneuron.config import parse as parse_model
from rayneuron.errors import ConfigError

MODEL = {"model": {"path": "/m", "name": "chat"}, "max_num_seqs": 4}


def content(gateway: Any, *, model: dict[str, Any] = MODEL, route: str | None = "/m/one") -> dict[str, Any]:
    return {
        "applications": [
            {"name": "one", "route_prefix": route, "import_path": "rayneuron.serve.app:build", "args": model},
            {"name": "two", "route_prefix": None, "import_path": "rayneuron.serve.app:build", "args": {"model": {"path": "/n"}}},
            {"name": "gate", "route_prefix": "/", "import_path": "rayneuron.gateway.app:build", "args": gateway},
        ]
    }


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., deployment_file.DeploymentFile]:
    def read(said: dict[str, Any], assignments: dict[str, Any] | None = None, application: str | None = None) -> Any:
        path = tmp_path / "file.yaml"
        path.write_text(yaml.safe_dump(said))
        return deployment_file.read(path, assignments, application)

    return read


def test_a_file_with_a_gateway_is_read_checked_and_written_again(read: Any) -> None:
    file = read(content({"models": [{"application": "one"}, {"application": "two"}], "default_model": "chat"}))
    assert set(file.deployments) == {"one", "two"} and set(file.gateways) == {"gate"}
    filled = file.filled()
    args = filled["applications"][2]["args"]
    assert args["replay"] == {"limit": 3, "strikes": 2, "hold_s": 30.0} and args["default_model"] == "chat"
    assert gateway_config.parse(args).default == "chat"
    preflight.check_runtime_env(file)


def test_what_is_set_reaches_the_copy_in_the_gateway(read: Any) -> None:
    said = content({"models": [{"application": "one", "args": MODEL}]})
    file = read(said, {"max_num_seqs": 9}, "one")
    assert file.deployments["one"].max_num_seqs == 9 and file.gateways["gate"].models[0].args["max_num_seqs"] == 9


@pytest.mark.parametrize(
    ("gateway", "other", "message"),
    [
        ({"models": [{"application": "three"}]}, {}, r"no application here is called three; there are: one, two"),
        ({"models": [{"application": "one"}], "host": {"instance": "inf2.48xlarge"}}, {}, "host is for models that may sleep, and none"),
        ({"models": [{"name": "a.b", "args": MODEL}], "host": {"instance": "inf2.48xlarge"}}, {}, r"models\.0\.name"),
        ({"models": [{"name": "a", "args": MODEL, "min": 2}], "host": {"instance": "inf2.48xlarge"}}, {}, "min 2 and max 1"),
        ({"models": [{"name": "a", "args": MODEL}]}, {}, "no host has cores for it; write host: {instance: TYPE}"),
        ({"models": [{"name": "a", "args": {**MODEL, "max_model_len": 0}}], "host": {"instance": "inf2.48xlarge"}}, {}, "max_model_len"),
        ({"models": [{"name": "one", "args": MODEL}], "host": {"instance": "inf2.48xlarge"}}, {}, "an application here is also called one"),
        ({"models": [{"name": "a", "args": MODEL}], "host": {"instance": "inf2.48xlarge", "nodes": 0}}, {}, "host.nodes"),
        ({"models": [{"name": "a", "args": MODEL}], "host": {"instance": "cores:2"}, "scaling": {"hold_s": -1}}, {}, "scaling.hold_s"),
        ({"models": [{"name": "a", "args": MODEL}], "host": {"instance": "cores:2"}, "scaling": {"holds": 1}}, {}, "did you mean hold_s"),
        ({"models": []}, {}, "models: must be a list with at least 1 entry"),
        ({"models": [{"application": "one"}, {"application": "one"}]}, {}, "stands there twice"),
        ({"models": [{"application": "one"}], "default_model": "x"}, {}, "default_model x is none of: one, chat"),
        ({"models": [{"application": "one", "args": {**MODEL, "max_num_seqs": 5}}]}, {}, r"models\.0\.args\.max_num_seqs is not what"),
        ({"models": [{"application": "one", "args": {**MODEL, "model": {"path": "/x", "name": "chat"}}}]}, {}, r"args\.model\.path"),
        ({"models": [{"application": "one"}], "tenants": {"a": {"keys": ["env:A"]}}}, {}, "tenants do not hold at /m/one"),
        ({"models": [{"application": "one"}], "tenants": {"a": {"keys": ["secret"]}}}, {"route": None}, "an entry says where a key is"),
        ({"models": [{"application": "one"}], "tenants": {"a": {"keys": ["env:A"], "wieght": 1}}}, {"route": None}, "did you mean weight"),
        (
            {"models": [{"application": "one"}], "tenants": {"default": {"keys": ["env:A"]}}, "serving": {"api_keys": ["env:B"]}},
            {"route": None}, "serving.api_keys are of the account default",
        ),
        (
            {"models": [{"application": "one"}]}, {"model": {**MODEL, "serving": {"autoscaling": {"min_replicas": 0}}}},
            "one may have no replica .* write 1",
        ),
        ({"models": [{"application": "one"}], "replay": {"limits": 1}}, {}, "did you mean limit"),
        ({"models": [{"application": "one"}, {"application": "two"}], "any_name": True}, {}, "write default_model"),
        ("one", {}, "applications.2.args: must be a mapping of keys"),
        ({"models": {"one": {}}}, {}, "models: must be a list"),
        ({"models": [{"application": "one"}, {"application": "two"}]}, {"model": {"model": {"path": "/m", "name": "two"}}}, "both answer"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(read: Any, gateway: dict[str, Any], other: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as wrong:
        read(content(gateway, **other))
    assert "file.yaml:" in wrong.value.message and "secret" not in wrong.value.message


@pytest.mark.parametrize(("index", "said"), [(2, "rayneuron.gateway.app:bild"), (1, "rayneuron.serve:build")])
def test_an_import_path_of_ours_that_is_none_is_no_stranger_s(read: Any, index: int, said: str) -> None:
    whole = content({"models": [{"application": "one"}]})
    whole["applications"][index]["import_path"] = said
    with pytest.raises(ConfigError, match=rf"file\.yaml:\d+: application \w+: import_path {said} is none of rayneuron's; write rayneuron"):
        read(whole)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "EngineServer", "num_replicas": 2}, "application gate: has no deployment 'EngineServer'; write name: Gateway$"),
        ({"name": "Gateway", "user_config": {}}, "application gate: a gateway has no user_config; leave it out"),
    ],
)
def test_what_overrides_a_gateway_s_deployment_is_checked(read: Any, changed: dict[str, Any], message: str) -> None:
    said = content({"models": [{"application": "one"}]})
    said["applications"][2]["deployments"] = [changed]
    with pytest.raises(ConfigError, match=rf"file\.yaml:\d+: {message}"):
        read(said)
    said["applications"][2]["deployments"] = [{"name": "Gateway", "num_replicas": 2}]
    assert "gate" in read(said).gateways


@pytest.mark.parametrize(("key", "said"), [("serving", {"api_keys": ["env:NOT_THERE"]}), ("tenants", {"a": {"keys": ["env:NOT_THERE"]}})])
def test_keys_of_a_gateway_that_are_not_here_are_missed_before_anything_loads(read: Any, key: str, said: dict[str, Any]) -> None:
    there = {"model": {"path": "demo:random:tiny", "name": "chat"}}
    whole = content({"models": [{"application": "one"}], key: said}, model=there, route=None)
    del whole["applications"][1]
    with pytest.raises(ConfigError, match=r"file\.yaml:\d+: application gate: .*NOT_THERE.* is not set on this machine"):
        preflight.inspect_file(read(whole))


def test_every_kind_of_drift_names_its_key() -> None:
    """Whatever key of a model differs, at any depth, it is that key that is named."""
    base = parse_model(MODEL)
    assert gateway_config.drift(base, parse_model(MODEL)) is None
    assert gateway_config.drift(parse_model({**MODEL, "dtype": "bfloat16"}), parse_model({**MODEL, "dtype": "bf16"})) is None, "one meaning"
    for changed, key in (
        ({"dtype": "bf16"}, "dtype"),
        ({"limits": {"max_waiting": 3}}, "limits.max_waiting"),
        ({"buckets": {"batch": [1, 4]}}, "buckets.batch"),
        ({"sampling_defaults": {"temperature": 0.5}}, "sampling_defaults.temperature"),
    ):
        assert gateway_config.drift(parse_model({**MODEL, **changed}), base) == key
    assert isinstance(base, Deployment)


@pytest.mark.parametrize(
    ("gateway", "message"),
    [
        ({"models": [{"name": "a", "args": MODEL}], "host": {"instance": "inf9.large"}}, "inf9.large"),
        ({"models": [{"name": "a", "args": {**MODEL, "tensor_parallel": 4}}], "host": {"instance": "cores:2"}}, "tensor_parallel"),
        (
            {"models": [{"name": n, "args": {**MODEL, "tensor_parallel": 2}, "pinned": True} for n in "ab"],
             "host": {"instance": "cores:2"}},
            "always awake",
        ),
    ],
)
def test_a_host_that_could_never_be_is_refused_by_the_builder_too(gateway: dict[str, Any], message: str) -> None:
    """`serve deploy` of such a file ends there, and what ran before runs on."""
    from rayneuron.gateway.app import build
    from rayneuron.serve.app import Refused

    with pytest.raises(Refused, match=message):
        build(gateway)
