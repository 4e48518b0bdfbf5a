"""What a first start has to make on this machine, begun while Ray starts: kernels, and a demo model. Replicas find it, or wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable

from rayneuron import demo, devices
from rayneuron.config import Deployment

BEHIND = 10  # of niceness: Ray gives up where it does not start in time
MAKE = "import sys; from rayneuron import demo; demo.resolve(sys.argv[1])"


def begin(deployments: Iterable[Deployment]) -> None:
    """Begin whatever nobody has made here. What fails says so in the replica, which tries it again."""
    for config in deployments:
        if devices.installed(config.device):
            threading.Thread(target=_make, args=(config,), name="rayneuron-build", daemon=True).start()


def _make(config: Deployment) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND)  # this thread, and whom it starts
    source = config.model.source
    if source.startswith("demo:") and demo.located(source) is None:
        subprocess.Popen([sys.executable, "-c", MAKE, source], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    devices.build_first(config.device)
