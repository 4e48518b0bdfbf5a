"""The fields of custom resources that cluster/ uses, by kind: `None` for a plain value, a dict for an object, a list of one for a list.

Written by hand from the kinds' public references; whatever else stands in a file is taken for a typing error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ANY: dict[str, Any] = {"*": None}
POD = "pod template"  # checked as a PodTemplate of Kubernetes itself

CLUSTER = {
    "rayVersion": None,
    "authOptions": {"mode": None},
    "headGroupSpec": {"rayStartParams": ANY, "template": POD},
    "workerGroupSpecs": [
        {
            "groupName": None, "replicas": None, "minReplicas": None, "maxReplicas": None, "numOfHosts": None, "rayStartParams": ANY,
            "template": POD,
        }
    ],
}  # fmt: skip
ENDPOINT = {"port": None, "portNumber": None, "path": None, "interval": None}
TERMS = [{"alias": None, "tags": ANY}]
KINDS: dict[tuple[str, str], dict[str, Any]] = {
    ("ray.io/v1", "RayService"): {"serveConfigV2": None, "rayClusterConfig": CLUSTER},
    ("monitoring.coreos.com/v1", "PodMonitor"): {"selector": {"matchLabels": ANY}, "podMetricsEndpoints": [ENDPOINT]},
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups": [{"name": None, "rules": [{"alert": None, "expr": None, "for": None, "labels": ANY, "annotations": ANY}]}]
    },
    ("karpenter.k8s.aws/v1", "EC2NodeClass"): {
        "role": None, "amiSelectorTerms": TERMS, "subnetSelectorTerms": TERMS, "securityGroupSelectorTerms": TERMS,
        "blockDeviceMappings": [{"deviceName": None, "ebs": {"volumeSize": None, "volumeType": None, "throughput": None, "iops": None}}],
    },
    ("karpenter.sh/v1", "NodePool"): {
        "template": {
            "spec": {
                "nodeClassRef": {"group": None, "kind": None, "name": None},
                "requirements": [{"key": None, "operator": None, "values": [None]}],
                "taints": [{"key": None, "value": None, "effect": None}],
                "expireAfter": None,
            }
        },
        "disruption": {"consolidationPolicy": None, "consolidateAfter": None, "budgets": [{"nodes": None, "reasons": [None]}]},
        "limits": ANY,
    },
}  # fmt: skip

# What cluster/helm/ sets of each chart, by the file's name.
VALUES: dict[str, dict[str, Any]] = {
    "neuron-values": {
        "devicePlugin": {"enabled": None}, "scheduler": {"enabled": None}, "npd": {"nodeRecovery": {"enabled": None}},
    },
    "kuberay-operator-values": {"resources": {"limits": {"cpu": None, "memory": None}}, "singleNamespaceInstall": None},
    "prometheus-values": {
        "prometheus": {"prometheusSpec": {"podMonitorSelectorNilUsesHelmValues": None, "ruleSelectorNilUsesHelmValues": None}},
        "grafana": {"sidecar": {"dashboards": {"enabled": None, "searchNamespace": None}}},
    },
}  # fmt: skip

INTERFACE = {
    "NetworkCardIndex": None, "DeviceIndex": None, "InterfaceType": None, "SubnetId": None, "Groups": [None], "DeleteOnTermination": None,
}  # fmt: skip
NODE = {  # what Ray's launcher passes to EC2 unread
    "ImageId": None, "InstanceType": None, "SubnetIds": [None], "SecurityGroupIds": [None], "Placement": {"GroupName": None},
    "BlockDeviceMappings": [{"DeviceName": None, "Ebs": {"VolumeSize": None, "VolumeType": None}}], "NetworkInterfaces": [INTERFACE],
}  # fmt: skip


def strangers(value: Any, known: Any, at: str = "") -> Iterator[str]:
    """Paths in `value` that the subset does not know."""
    if known is None or known == POD or known == ANY:
        if known is None and isinstance(value, dict | list):
            yield f"{at}: {value} where a plain value belongs"
    elif isinstance(known, list):
        for i, item in enumerate(value):
            yield from strangers(item, known[0], f"{at}[{i}]")
    else:
        for key, inner in value.items():
            if key in known:
                yield from strangers(inner, known[key], f"{at}.{key}")
            else:
                yield f"{at}.{key}"


def pods(value: Any, known: Any) -> Iterator[dict[str, Any]]:
    """The pod templates in an object of a known kind."""
    if known == POD:
        yield value
    elif isinstance(known, list):
        for item in value:
            yield from pods(item, known[0])
    elif isinstance(known, dict):
        for key in known.keys() & value.keys():
            yield from pods(value[key], known[key])
