"""Ray Serve's words as data are Ray's words: same names, and what is accepted here Ray accepts too."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from rayneuron import serve_config
from rayneuron.errors import ConfigError
from rayneuron.validation import validate

WRONG: tuple[Any, ...] = (None, True, 0, -1, 1, 7, 0.5, 200, 10**6, 10**30, "", "x", "1", "/x/", [], [1], {}, {"a": 1}, float("nan"))
OWN = {"host", "port"}  # of an application: Ray's own schema refuses them beside other applications


def test_the_names_are_rays() -> None:
    from ray.serve import config, schema

    pairs = (
        (serve_config.File, schema.ServeDeploySchema, set()),
        (serve_config.HttpOptions, schema.HTTPOptionsSchema, set()),
        (serve_config.Application, schema.ServeApplicationSchema, OWN),
        (serve_config.Overrides, schema.DeploymentSchema, set()),
        (serve_config.ActorOptions, schema.RayActorOptionsSchema, set()),
        (serve_config.Autoscaling, config.AutoscalingConfig, set()),
    )
    for ours, theirs, left_out in pairs:
        assert set(ours.model_fields) == set(theirs.model_fields) - left_out, ours.__name__


def files() -> Iterator[tuple[str, dict[str, Any]]]:
    """A good file with one key set to one value, for every key and value."""
    good = {"name": "a", "route_prefix": "/", "import_path": "a:b", "args": {}, "deployments": [{"name": "EngineServer"}]}
    kinds = {
        "": serve_config.File, "http_options": serve_config.HttpOptions, "app": serve_config.Application,
        "deployment": serve_config.Overrides, "actor": serve_config.ActorOptions, "autoscaling": serve_config.Autoscaling,
    }  # fmt: skip
    for where, kind in kinds.items():
        for key in kind.model_fields:
            for value in WRONG:
                app: dict[str, Any] = copy.deepcopy(good)
                file: dict[str, Any] = {"applications": [app]}
                target: dict[str, Any] = {"": file, "app": app, "deployment": app["deployments"][0]}.get(where, {})
                target[key] = value
                if where == "http_options":
                    file[where] = {key: value}
                elif where == "actor":
                    app["deployments"][0]["ray_actor_options"] = {key: value}
                elif where == "autoscaling":
                    app["deployments"][0]["autoscaling_config"] = {key: value}
                yield f"{where}.{key}={value!r}"[:80], file


# Ray looks closer into these than a file check needs to: what is wrong in them is said by Ray, when it starts.
DEEPER = (
    *("logging_config", "grpc_options", "controller_options", "tracing_config", "request_router_config", "gang_scheduling_config"),
    *("deployment_actors", "backpressure_config", "placement_group", "policy", "label_selector", "fallback_strategy", "import_path"),
    *("accelerator_type", "resources", "runtime_env", "ssl_", "external_scaler"),
)


@pytest.mark.filterwarnings("ignore")
def test_what_is_accepted_here_is_accepted_by_ray() -> None:
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    refused = 0
    for what, file in files():
        try:
            validate(serve_config.File, file)
        except ConfigError as wrong:
            refused += 1
            assert wrong.param and "\n" not in wrong.message and len(wrong.message) < 400, what
            continue
        if not any(word in what for word in DEEPER):
            try:
                ServeDeploySchema.model_validate(copy.deepcopy(file))
                for changed in file["applications"][0]["deployments"]:
                    AutoscalingConfig.model_validate(changed.get("autoscaling_config") or {})
            except (pydantic.ValidationError, ValueError, TypeError) as theirs:
                pytest.fail(f"{what} is accepted, but not by Ray: {theirs}")
    assert refused > 500
