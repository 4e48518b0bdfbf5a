"""What is asked of a machine without the SDK, and of its network: versions, devices, memory, ports, collectives."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path

from rayneuron import settings
from rayneuron.devices.neuron.releases import COMPILER_BYTES, PINNED, SYSTEM, SYSTEM_PACKAGES
from rayneuron.neuron_check.steps import Differs, Item, Machine, NotHere, run
from rayneuron.placement import cores, instances, ports
from rayneuron.policies.packing import compact

PACKAGES = ("aws-neuronx-dkms", *SYSTEM)
INSTALL = f"apt-get install --allow-downgrades {SYSTEM_PACKAGES}"
DISK_BYTES = 50 << 30
_PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")


def system(machine: Machine) -> str:
    """Kernel, Python, product."""
    product = _PRODUCT.read_text().strip() if _PRODUCT.is_file() else "unknown"
    version = platform.python_version_tuple()
    found = f"kernel {platform.release()}, Python {platform.python_version()}, product {product}"
    if not machine.standin and not (3, 10) <= (int(version[0]), int(version[1])) <= (3, 12):
        raise Differs(found)
    return found


def packages(machine: Machine) -> str:
    """Versions of the driver and the runtime."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = run(["dpkg-query", "-W", "-f", "${Version}", name])
        except Differs:
            if machine.standin:
                raise NotHere("a stand-in has no driver") from None
            raise Differs(f"{name} is not installed; there are {found or 'none of them'}") from None
    if not all(found[name].startswith(f"{version}.") for name, version in SYSTEM.items()):
        raise Differs(str(found))
    return str(found)


def devices(machine: Machine) -> str:
    """The devices by neuron-ls, against the instance."""
    chips, product = cores.probe(Path("/"))
    if not chips:
        if machine.standin:
            raise NotHere("a stand-in has no devices")
        raise Differs("no devices")
    kind = instances.instance(machine.instance) if machine.instance else cores.detect(cores.Facts(chips=chips, product=product))
    left = cores.left_here(kind, settings.given("NEURON_RT_VISIBLE_CORES"))
    wrong = [*cores.check_links(kind, chips)]
    found = f"{len(chips)} devices of {kind.name}, cores {compact(left)}, {kind.core_memory_bytes >> 30} GiB each"
    if wrong or len(left) < kind.cores:
        raise Differs("; ".join([found, *wrong]))
    return found


def space(machine: Machine) -> str:
    """Memory for one compiler at least, disk for the cache, ports that nobody else is given."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    folder = settings.cache_dir()
    while not folder.is_dir():
        folder = folder.parent
    disk = shutil.disk_usage(folder).free
    found = f"{os.cpu_count()} processors, {memory >> 30} GiB memory, {disk >> 30} GiB free in {folder}"
    wrong = [] if memory >= COMPILER_BYTES or machine.standin else [f"a compiler is given {COMPILER_BYTES >> 30} GiB"]
    wrong += [] if disk >= DISK_BYTES or machine.standin else [f"{DISK_BYTES >> 30} GiB are wanted"]
    danger = ports.endangered(ports.pool(settings.root_ports()))
    if wrong or danger:
        raise Differs("; ".join([found, *wrong, *([danger] if danger else [])]))
    return found


def collectives(machine: Machine) -> str:
    """AWS's own test of sums over cores, at each degree."""
    if machine.standin:
        raise NotHere("a stand-in has no devices")
    for ranks in (r for r in machine.degrees if r > 1):
        said = run(["nccom-test", "-r", str(ranks), "allr", "-d", "bf16", "-b", "16KB", "-e", "1MB", "--check"])
        if re.search(r"fail|error", said, re.IGNORECASE):
            raise Differs(said[-2000:])
    return f"passed at {', '.join(map(str, machine.degrees))} ranks"


def network(machine: Machine) -> str:
    """EFA devices and what they are allowed."""
    if machine.standin or not machine.hosts:
        raise NotHere("no --hosts were named")
    said = run(["fi_info", "-p", "efa", "-t", "FI_EP_RDM"])
    adapters = len(list(Path("/dev/infiniband").glob("uverbs*")))
    found = f"{said.count('provider: efa')} endpoints, {adapters} adapters"
    if not adapters:
        raise Differs(found)
    return found


def between(machine: Machine) -> str:
    """AWS's own test of sums over nodes."""
    if machine.standin or not machine.hosts:
        raise NotHere("no --hosts were named")
    ranks = max(machine.degrees) * len(machine.hosts)
    command = ["nccom-test", "-r", str(ranks), "-N", str(len(machine.hosts)), "allr", "-d", "bf16", "-b", "16KB", "-e", "8MB", "--check"]
    return run([*command, "--hosts", *machine.hosts])[-2000:]


HOST = (
    Item(1, "host", "uname -r; python -V; product_name", "Python 3.10-3.12, the instance's name",
         "install another Python: there are no wheels for this one", system),
    Item(2, "host", f"dpkg-query -W {' '.join(PACKAGES)}", f"{', '.join(f'{n} {v}' for n, v in SYSTEM.items())}: those of SDK {PINNED.sdk}",
         f"{INSTALL}. Without collectives the first load of two ranks says 'Error opening libnccom.so'", packages),
    Item(3, "host", "neuron-ls -j, against the instance type", "every device of the instance, its cores and memory",
         "name the instance (--instance), or pass all devices to the container", devices),
    Item(4, "host", "rayneuron doctor; rayneuron plan FILE --instance TYPE", "the cores of step 3; GiB a core below what it has",
         "instance: of the file"),
    Item(5, "host", "nproc; free; df; ip_local_reserved_ports", "24 GiB a compiler, 50 GiB of disk, ports of the runtime kept from others",
         "compile.workers: 1, another compile.cache, or the sysctl that is named", space),
    Item(6, "host", "nccom-test -r N allr -d bf16 -b 16KB -e 1MB --check", "passed at each degree",
         "the driver or the hardware first: nothing of ours matters before", collectives),
)  # fmt: skip
GROUP = (
    Item(30, "group", "fi_info -p efa -t FI_EP_RDM; ls /dev/infiniband", "EFA endpoints, adapters in the container",
         "security group to itself, all traffic; --device=/dev/infiniband/uverbs*; ulimit -l unlimited", network),
    Item(31, "group", "nccom-test -r N -N NODES allr ... --hosts", "passed; its latency at 128 KB, twice a layer, is the floor of a token",
         "the network first", between),
    Item(32, "group", "rayneuron serve a tiny model with nodes: 2, both caches warm; then one of them cold",
         "the tokens of one node; a cold node is waited for", "the logs of both workers"),
    Item(33, "group", "rayneuron serve deployments/llama405b_trn1x4.yaml", "load time a node, memory of step 21, time a token",
         "tensor_parallel 32 x pipeline_parallel 4"),
)  # fmt: skip
