"""What a first start has to make on this machine, begun while Ray starts: kernels, and a demo model. Replicas find it, or wait for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable

from rayneuron import demo, devices
from rayneuron.config import Deployment

MAKE = "import sys; from rayneuron import demo; demo.resolve(sys.argv[1])"


def begin(deployments: Iterable[Deployment]) -> None:
    """Begin whatever nobody has made here. What fails says so in the replica, which tries it again."""
    for config in deployments:
        if devices.installed(config.device):
            threading.Thread(target=devices.build_first, args=(config.device,), name="rayneuron-build", daemon=True).start()
            source = config.model.source
            if source.startswith("demo:") and demo.located(source) is None:
                subprocess.Popen([sys.executable, "-c", MAKE, source], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
