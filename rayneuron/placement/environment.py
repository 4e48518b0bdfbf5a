"""The environment of one worker process: every variable the Neuron runtime and its libraries read, as a pure function of its place.

It must be in place before the process imports torch: the runtime reads most of it once.
Meanings and sources: the SDK's documentation, NxD Inference's launcher.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rayneuron.config import Deployment
from rayneuron.devices.neuron import releases
from rayneuron.devices.neuron.releases import ROOT, VISIBLE
from rayneuron.errors import ConfigError
from rayneuron.placement.cores import COUNT, NOSET, visible
from rayneuron.placement.instances import Instance
from rayneuron.placement.layout import Layout, Worker

_EXEC_TIMEOUT_S = 600  # the documents name 2, 30 and 600 as the default: set it
# Read by the C library when a process starts, and never again: more arenas multiply host memory while weights load.
BEFORE_START: Mapping[str, str] = MappingProxyType({"MALLOC_ARENA_MAX": "64"})
_FORK_SAFE_SINCE = (5, 15)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the group meets. `nodes`: each node's internal IP in node order, as Ray knows it (never what HOST_IP or a host name says).

    `roots`: one device-collectives port a stage, on the node of the stage's rank 0. `host`: the port of host messages, on node 0.
    """

    nodes: tuple[str, ...]
    roots: tuple[int, ...]
    host: int

    def __post_init__(self) -> None:
        for ip in self.nodes:
            _check_address(ip)
        loopback = [ipaddress.ip_address(ip).is_loopback for ip in self.nodes]
        if any(loopback) and not all(loopback):
            raise ConfigError(f"{self.nodes[loopback.index(True)]} cannot be reached from the other nodes ({', '.join(self.nodes)})")
        if not all(0 < port < 65536 for port in (*self.roots, self.host)):
            raise ConfigError(f"ports {', '.join(map(str, (*self.roots, self.host)))} must lie in 1-65535")


@dataclass(frozen=True, slots=True)
class Host:
    """What a node's environment depends on beside the instance type. `kernel`: as `uname -r` prints it. `vcpus` None: the instance's.

    `async_mode`: steps are queued while one runs; `float8`: weights or KV are; `length`: the longest context; `flags`: the file's, for
    neuronx-cc.
    """

    kernel: str
    vcpus: int | None = None
    cache_url: str | None = None
    async_mode: bool = False
    float8: bool = False
    length: int = 0
    flags: str = ""


def host_of(config: Deployment, length: int, float8: bool, kernel: str) -> Host:
    """The Host of a deployment's own words."""
    said = config.compile
    return Host(kernel, None, said.cache, said.async_mode, float8, length, said.flags)


def environment(
    layout: Layout, worker: Worker, instance: Instance, cores: Sequence[int], endpoints: Endpoints, host: Host, deployment: str
) -> dict[str, str]:
    """All variables of one worker. `cores`: those the ledger granted to it, contiguous. Raises ConfigError."""
    if len(cores) != len(worker.ranks):
        raise ConfigError(f"worker {worker.index} of {deployment} drives {len(worker.ranks)} ranks but was given {len(cores)} cores")
    meetings = [*(_root(layout, stage, endpoints) for stage in range(layout.pipeline_parallel)), join(endpoints.nodes[0], endpoints.host)]
    if len(set(meetings)) < len(meetings):
        raise ConfigError(f"meeting places {', '.join(meetings)} of one group must differ from each other")
    vcpus = instance.vcpus if host.vcpus is None else host.vcpus
    out = {
        NOSET: "1",
        VISIBLE: visible(cores),
        COUNT: str(len(cores)),  # agrees with the list, for a library that only looks here
        "NEURON_RT_EXEC_TIMEOUT": str(_EXEC_TIMEOUT_S),
        "NEURON_PROCESS_TAG": deployment if layout.pipeline_parallel == 1 else f"{deployment}/stage{worker.stage}",
        "OMP_NUM_THREADS": str(max(1, vcpus * len(cores) // instance.cores)),
    }
    if len(instance.lncs) > 1:
        out["NEURON_LOGICAL_NC_CONFIG"] = str(instance.lnc)
    if host.cache_url:
        out["NEURON_COMPILE_CACHE_URL"] = host.cache_url
    out |= releases.variables(
        float8=host.float8, length=host.length, lnc=instance.lnc, async_mode=host.async_mode, flags=host.flags
    )  # fmt: skip
    return out | _rendezvous(layout, worker, endpoints) | _network(layout, instance, host)


def _rendezvous(layout: Layout, worker: Worker, endpoints: Endpoints) -> dict[str, str]:
    out = {}
    if layout.tensor_parallel > 1:
        out[ROOT] = _root(layout, worker.stage, endpoints)
    if layout.nodes > 1 or layout.pipeline_parallel > 1:
        out["NEURON_RANK_ID"] = str(layout.place(worker))
    if layout.nodes_per_stage > 1:
        out["NEURON_LOCAL_TP"] = str(layout.local_tp)
    if layout.pipeline_parallel > 1:
        out["NEURON_PP_STAGES"] = str(layout.pipeline_parallel)
        out["CPU_COMM_ID"] = join(endpoints.nodes[0], endpoints.host)
    return out


def _root(layout: Layout, stage: int, endpoints: Endpoints) -> str:
    """ip:port where a stage's device collectives meet: its own rank 0."""
    return join(endpoints.nodes[layout.stage(stage)[0].node], endpoints.roots[stage])


def _network(layout: Layout, instance: Instance, host: Host) -> dict[str, str]:
    if layout.nodes == 1 or not instance.efa:
        return {}
    out = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    return out if fork_safe(host.kernel) else out | {"FI_EFA_FORK_SAFE": "1"}


def fork_safe(kernel: str) -> bool:
    """True where a process that uses EFA may fork: kernels from 5.15 on. An unreadable version counts as old: the flag does no harm."""
    match = re.match(r"(\d+)\.(\d+)", kernel)
    return match is not None and (int(match[1]), int(match[2])) >= _FORK_SAFE_SINCE


def join(ip: str, port: int) -> str:
    """ip:port, with brackets around an IPv6 address."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _check_address(ip: str) -> None:
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        raise ConfigError(
            f"{ip!r} is no IP address; the runtime wants a literal one, as `ray.nodes()` shows it (NodeManagerAddress)"
        ) from None
    kind = _kind(address)
    if kind is not None:
        raise ConfigError(f"{ip} is no address of one node: {kind}; use its internal IP, as `ray.nodes()` shows it (NodeManagerAddress)")


def _kind(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """Why others cannot reach a node there, None where they may."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None,))[0]
        if inner is not None:
            return f"it carries the IPv4 address {inner}; write that one"
        if address.scope_id is not None:
            return "what follows % is known on one host only"
    if address.is_unspecified or (address.version == 4 and int(address) < 1 << 24):
        return "unspecified"
    for found, word in ((address.is_multicast, "multicast"), (address.is_link_local, "link-local, which no router passes on")):
        if found:
            return word
    if not address.is_loopback and address.is_reserved:
        return "broadcast" if address == ipaddress.IPv4Address("255.255.255.255") else "reserved"
    return None
