"""Every file in deployments/ is a Serve config that Ray accepts and whose args are ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayneuron import deployment_file, preflight
from rayneuron.config import Deployment
from rayneuron.errors import ConfigError

FOLDER = Path(__file__).parent.parent / "deployments"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ray_and_we_accept_it(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    file = deployment_file.read(path)
    schema = ServeDeploySchema.model_validate(file.content)
    assert {application.name for application in schema.applications} >= set(file.deployments)
    prefixes = [application.route_prefix for application in schema.applications]
    assert len(set(prefixes)) == len(prefixes)


def test_the_demo_is_what_the_readme_says() -> None:
    (deployment,) = deployment_file.read(FOLDER / "smollm2.yaml").deployments.values()
    assert (deployment.model.path, deployment.device, deployment.dtype) == ("demo:smollm2", "cpu", "bf16")


ONE = """
applications:
  - name: one
    route_prefix: /
    import_path: rayneuron.serve.app:build
    args: {model: {path: /m}, max_num_seqs: 4}
"""
TWO = (
    ONE
    + """
  - name: two
    route_prefix: /two
    import_path: rayneuron.serve.app:build
    args: {model: {path: /n}}
  - name: other
    route_prefix: /other
    import_path: theirs:app
"""
)


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "deployment.yaml"
        path.write_text(text)
        return path

    return write


def test_override_reaches_the_checked_deployment_and_the_content(file) -> None:
    read = deployment_file.read(file(ONE), {"model.path": "/elsewhere", "limits.max_waiting": 7})
    deployment = read.deployments["one"]
    assert (deployment.model.path, deployment.max_num_seqs, deployment.limits.max_waiting) == ("/elsewhere", 4, 7)
    assert read.content["applications"][0]["args"] == {"model": {"path": "/elsewhere"}, "max_num_seqs": 4, "limits": {"max_waiting": 7}}


def test_override_of_all_applications(file) -> None:
    read = deployment_file.read(file(TWO), {"max_num_seqs": 9}, application="all")
    assert {name: deployment.max_num_seqs for name, deployment in read.deployments.items()} == {"one": 9, "two": 9}


def test_a_cpu_stands_in_for_the_instances_that_are_named() -> None:
    from rayneuron.config import parse
    from rayneuron.serve.profile import stand_in_env

    named = [parse({"model": {"path": "/m"}, "instance": name}) for name in ("inf2.xlarge", "trn1.32xlarge")]
    assert stand_in_env(named) == {"RAY_OVERRIDE_RESOURCES": '{"CPU": 128, "neuron_cores": 32}'}
    assert stand_in_env([parse({"model": {"path": "/m"}})]) == {}


def entries(device: str, instance: str | None = "inf2.48xlarge", **more: Any) -> tuple[dict[str, Any], list[Deployment]]:
    from rayneuron.config import parse

    return {"applications": [{"name": "m", **more}]}, [parse({"model": {"path": "/m"}, "device": device, "instance": instance})]


@pytest.mark.parametrize(
    ("device", "devices", "visible", "exported", "counted"),
    [
        ("cpu", None, None, None, 24),
        ("cpu", None, "4-7", "4,5,6,7", 4),  # a range is one core to Ray, which then refuses to start
        ("cpu", None, "4,5,6,7", "4,5,6,7", 4),
        ("neuron", None, None, None, None),  # not a Neuron node: Ray must not count what another node has
        ("neuron", None, "4-7", "4,5,6,7", 4),  # no neuron-ls in the image
        ("neuron", [2, 3, 4], None, None, 6),
        ("neuron", [2, 3, 4], "8-9", "8,9", 2),
    ],
)
def test_ray_counts_what_is_left_to_us(
    device: str, devices: list[int] | None, visible: str | None, exported: str | None, counted: int | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Faults 23, 24 and 26: the environment of the Ray that `rayneuron serve` starts."""
    from rayneuron.placement.instances import INSTANCES
    from rayneuron.serve.profile import ray_environment
    from tests.placement.test_cores import listed, neuron_ls

    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "RAY_OVERRIDE_RESOURCES", "RAYNEURON_EXPORTED"):
        monkeypatch.delenv(name, raising=False)
    if devices is not None:
        neuron_ls(tmp_path, listed(INSTANCES["inf2.48xlarge"], devices))
    if visible is not None:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    found = ray_environment(*entries(device), "plain", tmp_path)
    assert (found.get("NEURON_RT_VISIBLE_CORES"), found["RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES"]) == (exported, "1")
    assert json.loads(found.get("RAY_OVERRIDE_RESOURCES", "{}")).get("neuron_cores") == counted
    plain = ray_environment(*entries("cpu", None), "plain", tmp_path)
    assert plain.get("NEURON_RT_VISIBLE_CORES") == visible and "RAY_OVERRIDE_RESOURCES" not in plain, "nothing is counted, nothing touched"


@pytest.mark.parametrize(
    "more",
    [
        {"runtime_env": {"env_vars": {"NEURON_RT_VISIBLE_CORES": "7"}}},
        {"deployments": [{"name": "EngineServer", "ray_actor_options": {"runtime_env": {"env_vars": {"NEURON_RT_NUM_CORES": "2"}}}}]},
    ],
)
def test_a_file_that_chooses_cores_by_hand(more: dict[str, Any]) -> None:
    content, _ = entries("cpu", **more)
    with pytest.raises(ConfigError, match=r"f\.yaml: runtime_env of .*application m sets NEURON_RT_.*write tensor_parallel: N"):
        preflight.check_runtime_env(deployment_file.DeploymentFile(Path("f.yaml"), content, {}))


def test_override_of_one_application_of_several(file) -> None:
    path = file(TWO)
    read = deployment_file.read(path, {"max_num_seqs": 9}, application="two")
    assert {name: deployment.max_num_seqs for name, deployment in read.deployments.items()} == {"one": 4, "two": 9}
    with pytest.raises(ConfigError, match="holds the applications one, two; say which one with --application NAME, or all"):
        deployment_file.read(path, {"max_num_seqs": 9})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: [", "cannot be read as YAML"),
        ("- a\n- b\n", "is not a Ray Serve config: it needs `applications:`"),
        ("model: {path: /m}\n", "is not a Ray Serve config"),
        ("applications:\n- name: x\n  import_path: theirs:app\n", "has no application with import_path: rayneuron.serve.app:build"),
        (ONE.replace("max_num_seqs", "max_num_seq"), "application one: unknown key max_num_seq; did you mean max_num_seqs?"),
        (ONE.replace("path: /m", "paht: /m"), "unknown key model.paht; did you mean path?"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str, file) -> None:
    with pytest.raises(ConfigError) as caught:
        deployment_file.read(file(text))
    assert message in caught.value.message


def test_assignments_are_read_as_yaml() -> None:
    words = ["model.path=demo:random:tiny", "max_num_seqs=4", "buckets.batch=[1, 2]", "serving.api_key=a=b", "max_model_len="]
    assert deployment_file.parse_assignments(words) == {
        "model.path": "demo:random:tiny",
        "max_num_seqs": 4,
        "buckets.batch": [1, 2],
        "serving.api_key": "a=b",
        "max_model_len": None,
    }
    for word in ("max_num_seqs", "=4", "a=[1"):
        with pytest.raises(ConfigError, match="--set"):
            deployment_file.parse_assignments([word])
