"""RayServices for KubeRay 1.5.1 or newer, each made from a deployment file.

One Ray pod a host: whoever packs models into cores does so inside it, so the Neuron scheduler extension is not needed. Probes and ports are
written out: what the operator puts in for them asks by `wget`, which no image of ours has, and Prometheus finds no port that is not named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rayneuron.placement import instances
from rayneuron.placement.cores import NOSET
from rayneuron.placement.instances import GIB, Instance
from rayneuron.placement.layout import CORES
from rayneuron.serve import profile

ROOT = Path(__file__).parent.parent
RAY = "2.60.0"
USER = 1000  # of the images of cluster/docker
GRACE_S = 660  # more than the 600 s a replica may finish its streams (serving.drain_timeout_s)
KEPT = 0.9  # of a host's CPUs and memory for the pod; the rest is the node's own
HEAD = {"cpu": "4", "memory": "16Gi"}
SERVE, AGENT = 8000, 52365  # of Serve's proxy, and of the agent beside each raylet
WORKER_PORTS = {"serve": SERVE, "metrics": 8080}
HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, **WORKER_PORTS}  # its Service has these and no others
# Ray's answer to SIGTERM: the node takes no more, and its replicas finish their streams (30 s else, which is less than they are promised).
DRAIN = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "630"}
MONITORED = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor"}


@dataclass(frozen=True)
class Service:
    """One manifest. `hosts` of `instance` (None: no Neuron machine) serve `deployment`. `models`: the claim that holds them, at /models."""

    deployment: str
    about: str
    instance: str | None = None
    hosts: int = 1
    models: str | None = "models"
    worker: Mapping[str, str] = field(default_factory=dict)  # resources where there is no instance


SERVICES = {
    "rayservice-inf2-host": Service(
        "inf2_three_models.yaml",
        "Three models on one inf2.48xlarge. Not run on AWS.\n  kubectl apply -f cluster/kuberay/rayservice-inf2-host.yaml",
        "inf2.48xlarge",
    ),
    "rayservice-trn1x4-405b": Service(
        "llama405b_trn1x4.yaml", "Llama-3.1-405B over four trn1.32xlarge with EFA. Not run on AWS.", "trn1.32xlarge", hosts=4
    ),
    "rayservice-trn1x4-405b-pp": Service(
        "llama405b_trn1x4_pp.yaml", "Llama-3.1-405B in four stages, a trn1.32xlarge each, with EFA. Not run on AWS.",
        "trn1.32xlarge", hosts=4,
    ),
    "rayservice-cpu": Service(
        "smollm2.yaml", "A small chat model on CPUs, for kind or any cluster.\n  kind load docker-image rayneuron:cpu",
        models=None, worker={"cpu": "4", "memory": "8Gi"},
    ),
}  # fmt: skip


def manifests() -> dict[str, tuple[list[Mapping[str, Any]], str]]:
    """By file name: the documents, and what to say above them."""
    return {name: ([service(name, s)], s.about) for name, s in SERVICES.items()}


def monitors() -> list[Mapping[str, Any]]:
    """What Prometheus scrapes. Any proxy answers for every replica of a model, so one pod is asked: sums over two would be twice that."""
    whole = [monitor("rayneuron-single-host", {"app.kubernetes.io/component": "single-host"}, "http", ["/metrics"])]
    for name, s in SERVICES.items():
        routes = [a["route_prefix"] for a in yaml.safe_load(_deployment(s))["applications"]]
        asked = [f"{route.rstrip('/')}/metrics" for route in routes if route]
        chosen = {"app.kubernetes.io/instance": named(name), "ray.io/node-type": "head"}
        whole.append(monitor(f"rayneuron-{named(name)}", chosen, "serve", asked))
    return [*whole, monitor("neuron-monitor", {"app.kubernetes.io/name": "neuron-monitor"}, "metrics", ["/metrics"])]


def monitor(name: str, chosen: Mapping[str, str], port: str, paths: list[str]) -> Mapping[str, Any]:
    """One PodMonitor of pods with these labels."""
    asked = [{"port": port, "path": path, "interval": "15s"} for path in paths]
    return {**MONITORED, "metadata": {"name": name}, "spec": {"selector": {"matchLabels": dict(chosen)}, "podMetricsEndpoints": asked}}


def named(file: str) -> str:
    """A service's name, of its file's."""
    return file.removeprefix("rayservice-")


def _deployment(s: Service) -> str:
    return (ROOT / "deployments" / s.deployment).read_text()


def service(name: str, s: Service) -> dict[str, Any]:
    """A RayService that serves one deployment file on a head without cores and a group of equal hosts."""
    machine = instances.instance(s.instance) if s.instance else None
    image = f"rayneuron:{'neuron' if machine else 'cpu'}"
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": named(name)},
        "spec": {
            "serveConfigV2": _deployment(s),
            "rayClusterConfig": {
                "rayVersion": RAY,
                "authOptions": {"mode": "token"},  # the operator makes the token and sets RAY_AUTH_MODE everywhere
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": pod(named(name), "ray-head", image, HEAD, None, s.models),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": s.instance.replace(".", "-") if s.instance else "cpu",
                        "replicas": 1,
                        "minReplicas": 1,
                        "maxReplicas": 1,
                        "numOfHosts": s.hosts,
                        "rayStartParams": {"resources": _quoted({CORES: machine.cores})} if machine else {},
                        "template": pod(
                            named(name), "ray-worker", image, limits(machine, s.hosts) if machine else s.worker, machine, s.models
                        ),
                    }
                ],
            },
        },
    }


def limits(machine: Instance, hosts: int) -> dict[str, str]:
    """A whole host: every device, its EFA interfaces where a group spans hosts, most of its CPUs and memory."""
    out = {"cpu": str(int(machine.vcpus * KEPT)), "memory": f"{int(machine.host_memory_bytes / GIB * KEPT)}Gi"}
    out["aws.amazon.com/neuron"] = str(machine.devices)
    if hosts > 1:
        out |= {"vpc.amazonaws.com/efa": str(machine.efa), "hugepages-2Mi": "5120Mi"}  # libfabric's own buffers
    return out


def pod(
    service: str, name: str, image: str, resources: Mapping[str, str], machine: Instance | None, models: str | None
) -> dict[str, Any]:
    """The template of one Ray pod: no root, nothing written but in volumes. What is compiled outlives the pod, in the claim `compiled`."""
    volumes: dict[str, Any] = {"shm": {"emptyDir": {"medium": "Memory"}}, "tmp": {"emptyDir": {}}, "home": {"emptyDir": {}}}
    mounts = {"shm": "/dev/shm", "tmp": "/tmp", "home": "/home/ray"}
    if models:
        volumes["models"], mounts["models"] = {"persistentVolumeClaim": {"claimName": models, "readOnly": True}}, "/models"
    if machine:
        volumes["compiled"], mounts["compiled"] = {"persistentVolumeClaim": {"claimName": "compiled"}}, "/compiled"
    worker = name == "ray-worker"
    container = {
        "name": name,
        "image": image,
        "ports": [{"name": n, "containerPort": port} for n, port in (WORKER_PORTS if worker else HEAD_PORTS).items()],
        "env": [{"name": key, "value": value} for key, value in {**environment(machine), **(DRAIN if worker else {})}.items()],
        "resources": {"limits": dict(resources), "requests": dict(resources)},
        "livenessProbe": probe("/api/healthz", AGENT, 120),  # ten minutes, as the operator's own
        "readinessProbe": probe("/-/healthz", SERVE, 1) if worker else probe("/api/healthz", AGENT, 10),
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": n, "mountPath": path} for n, path in mounts.items()],
    }  # fmt: skip
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": n, **volume} for n, volume in volumes.items()],
    }
    if machine:
        spec["nodeSelector"] = {"node.kubernetes.io/instance-type": machine.name}
        spec["tolerations"] = [{"key": "aws.amazon.com/neuron", "operator": "Exists", "effect": "NoSchedule"}]
    labels = {"app.kubernetes.io/name": "rayneuron", "app.kubernetes.io/instance": service}
    return {"metadata": {"labels": labels}, "spec": spec}


def probe(path: str, port: int, failures: int) -> dict[str, Any]:
    """A pod is asked every five seconds, and given up after so many failures. Nodes without a replica have no proxy, and get no calls."""
    asked = {"httpGet": {"path": path, "port": port}, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": failures}
    return {"initialDelaySeconds": 30, **asked}


def environment(machine: Instance | None) -> dict[str, str]:
    """What Ray reads as it starts, the same on head and workers; raylets leave the visible cores alone."""
    ours = {NOSET: "1", "NEURON_COMPILE_CACHE_URL": "/compiled"} if machine else {}
    return {**profile.PLAIN, "RAY_USAGE_STATS_ENABLED": "0", **ours}


def _quoted(resources: Mapping[str, float]) -> str:
    """As `ray start --resources` reads it behind a shell, in KubeRay's own spelling."""
    return json.dumps(json.dumps(resources))
