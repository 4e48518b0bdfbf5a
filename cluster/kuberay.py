"""RayServices for KubeRay 1.5.1 or newer, each made from a deployment file.

One Ray pod a host: whoever packs models into cores does so inside it, so the Neuron scheduler extension is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def service(name: str, s: Service) -> dict[str, Any]:
    """A RayService that serves one deployment file on a head without cores and a group of equal hosts."""
    machine = instances.instance(s.instance) if s.instance else None
    image = f"rayneuron:{'neuron' if machine else 'cpu'}"
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name.removeprefix("rayservice-")},
        "spec": {
            "serveConfigV2": (ROOT / "deployments" / s.deployment).read_text(),
            "rayClusterConfig": {
                "rayVersion": RAY,
                "authOptions": {"mode": "token"},  # the operator makes the token and sets RAY_AUTH_MODE everywhere
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": pod("ray-head", image, HEAD, None, s.models),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": s.instance.replace(".", "-") if s.instance else "cpu",
                        "replicas": 1,
                        "minReplicas": 1,
                        "maxReplicas": 1,
                        "numOfHosts": s.hosts,
                        "rayStartParams": {"resources": _quoted({CORES: machine.cores})} if machine else {},
                        "template": pod("ray-worker", image, limits(machine, s.hosts) if machine else s.worker, machine, s.models),
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


def pod(name: str, image: str, resources: Mapping[str, str], machine: Instance | None, models: str | None) -> dict[str, Any]:
    """The template of one Ray pod: no root, nothing written but in volumes."""
    volumes = {"shm": {"emptyDir": {"medium": "Memory"}}, "tmp": {"emptyDir": {}}, "home": {"emptyDir": {}}}
    mounts = {"shm": "/dev/shm", "tmp": "/tmp", "home": "/home/ray"}
    if models:
        volumes["models"], mounts["models"] = {"persistentVolumeClaim": {"claimName": models, "readOnly": True}}, "/models"
    container = {
        "name": name,
        "image": image,
        "env": [{"name": key, "value": value} for key, value in environment(machine).items()],
        "resources": {"limits": dict(resources), "requests": dict(resources)},
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
    labels = {"app.kubernetes.io/name": "rayneuron"}
    return {"metadata": {"labels": labels}, "spec": spec}


def environment(machine: Instance | None) -> dict[str, str]:
    """What Ray reads as it starts, the same on head and workers; raylets leave the visible cores alone."""
    return {**profile.PLAIN, "RAY_USAGE_STATS_ENABLED": "0", **({NOSET: "1"} if machine else {})}


def _quoted(resources: Mapping[str, float]) -> str:
    """As `ray start --resources` reads it behind a shell, in KubeRay's own spelling."""
    return json.dumps(json.dumps(resources))
