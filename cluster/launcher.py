"""Configs for Ray's cluster launcher (`ray up`): one inf2.48xlarge, and four trn1.32xlarge with EFA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayneuron.devices.neuron.releases import INDEX, SYSTEM_PACKAGES
from rayneuron.placement import instances
from rayneuron.placement.cores import NOSET
from rayneuron.placement.instances import Instance
from rayneuron.placement.layout import CORES
from rayneuron.serve import profile

REGION, ZONE = "us-east-1", "us-east-1b"
HEAD = "m7i.2xlarge"
DISK_GB = 500
FROM = " Run it inside the VPC: nodes have internal addresses alone, and reach pip and apt by a NAT gateway."
EXPORTS = {**profile.PLAIN, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", NOSET: "1"}


def manifests() -> dict[str, tuple[list[Mapping[str, Any]], str]]:
    """By file name: the document, and what to say above it."""
    return {
        "inf2-host": ([cluster("inf2.48xlarge", 1)], f"One inf2.48xlarge. Not run on AWS.{FROM}\n  ray up cluster/launcher/inf2-host.yaml"),
        "trn1-efa": ([cluster("trn1.32xlarge", 4)], f"Four trn1.32xlarge with EFA between them. Not run on AWS.{FROM}"),
    }


def cluster(name: str, hosts: int) -> dict[str, Any]:
    """A head without cores and so many hosts that are always there."""
    machine = instances.instance(name)
    start = " ".join(f"{key}={value}" for key, value in EXPORTS.items())
    return {
        "cluster_name": name.replace(".", "-"),
        "max_workers": hosts,
        "provider": {"type": "aws", "region": REGION, "availability_zone": ZONE, "cache_stopped_nodes": False, "use_internal_ips": True},
        "auth": {"ssh_user": "ubuntu"},
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {**_image(), "InstanceType": HEAD, **_network(None)}},
            "neuron": {
                "min_workers": hosts,
                "max_workers": hosts,
                "resources": {"CPU": machine.vcpus, CORES: machine.cores},  # Ray's own table does not have every type
                "node_config": {**_image(), "InstanceType": name, **_network(machine if hosts > 1 else None)},
            },
        },
        "head_node_type": "head",
        "file_mounts": {"~/.ray/auth_token": "~/.ray/auth_token"},  # `ray get-auth-token --generate` makes it
        "setup_commands": [  # an image's runtime is the newest, and pip installs an SDK by its number
            f"sudo apt-get update && sudo apt-get install -y --allow-downgrades {SYSTEM_PACKAGES}",
            f"python3 -m venv ~/rayneuron && ~/rayneuron/bin/pip install --extra-index-url {INDEX} '<WHEEL>[neuron,s3]'",
        ],
        "head_start_ray_commands": [
            "~/rayneuron/bin/ray stop",
            f"{start} ~/rayneuron/bin/ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": ["~/rayneuron/bin/ray stop", f"{start} ~/rayneuron/bin/ray start --address=$RAY_HEAD_IP:6379"],
    }


def _image() -> dict[str, Any]:
    """A Deep Learning AMI with the Neuron driver and EFA, and room for weights."""
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": DISK_GB, "VolumeType": "gp3"}}
    return {"ImageId": "<NEURON_AMI>", "BlockDeviceMappings": [disk]}


def _network(efa: Instance | None) -> dict[str, Any]:
    """One plain interface, or every EFA card's; then subnet, security group and placement are said with the interfaces alone."""
    if efa is None:
        return {"SubnetIds": ["<SUBNET>"], "SecurityGroupIds": ["<SECURITY_GROUP>"]}  # Ray reads lists alone, and else takes any subnet
    cards = [
        {
            "NetworkCardIndex": card, "DeviceIndex": min(card, 1), "InterfaceType": "efa", "SubnetId": "<SUBNET>",
            "Groups": ["<SECURITY_GROUP>"], "DeleteOnTermination": True,
        }
        for card in range(efa.efa)
    ]  # fmt: skip
    return {"NetworkInterfaces": cards, "Placement": {"GroupName": "<CLUSTER_PLACEMENT_GROUP>"}}
