"""Stand-in: the runtime. Cores are claimed until the process ends, memory a core is counted, and its environment is read."""

import fcntl
import os
import queue
import signal
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import torch
from torch_neuronx.utils import get_platform_target

from neuronx_distributed.trace.compiler import TWO_CORE_CHIPS

CLAIMED = {}
USED = {}
BASE_BYTES, GRAPH_BYTES = 1 << 30, 80 << 20  # scratchpad and collectives; code and DMA rings of a graph


MET = {}  # moments, and how often this process has been there


def moment(name):
    """STANDIN_ENDS="KILL to_neuron 1": a test's signal to this process when it comes there for the first time."""
    MET[name] = MET.get(name, 0) + 1
    sent, where, time = (os.environ.get("STANDIN_ENDS") or "none nowhere 0").split()
    if (where, int(time)) == (name, MET[name]):
        os.kill(os.getpid(), signal.Signals[f"SIG{sent}"])


class Lane:
    """Work of the device, one after the other. Nobody waits for it when the process ends, whatever the device waits for."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._queue,), daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work, *args):
        future = Future()
        self._queue.put((future, work, args))
        return future


def _work(asked):
    while (item := asked.get()) is not None:
        future, work, args = item
        try:
            future.set_result(work(*args))
        except BaseException as problem:
            future.set_exception(problem)
        del item, future, work, args


def check(graphs, layout):
    """What must agree between how graphs were compiled and how this process runs them. Raises RuntimeError."""
    page, lnc = os.environ.get("NEURON_SCRATCHPAD_PAGE_SIZE") or None, 1
    if get_platform_target() not in TWO_CORE_CHIPS:
        lnc = int(os.environ.get("NEURON_LOGICAL_NC_CONFIG") or os.environ.get("NEURON_RT_VIRTUAL_CORE_SIZE") or 2)
    for graph in graphs:
        dtypes = {graph.shapes[name][1] for kind, name in graph.sources if kind in ("weight", "state")}
        if torch.float8_e4m3fn in dtypes and os.environ.get("XLA_HANDLE_SPECIAL_SCALAR") != "1":
            raise RuntimeError("f8e4m3 needs XLA_HANDLE_SPECIAL_SCALAR=1 when it runs")
        if torch.float8_e5m2 in {graph.shapes[name][1] for name in graph.states}:
            raise RuntimeError("StateInitializer: cannot create f8e5m2 on privateuseone")
        if str(graph.flags["page"] or "") != (page or ""):
            raise RuntimeError(f"NRT_INVALID: compiled with a scratchpad page of {graph.flags['page']}, NEURON_SCRATCHPAD_PAGE_SIZE={page}")
        if (graph.flags["lnc"] or lnc) != lnc:
            raise RuntimeError(f"NRT_INVALID: compiled for logical cores of {graph.flags['lnc']}, this process has {lnc}")
    if layout is not None and layout.lnc != lnc:
        raise RuntimeError(f"NRT_INVALID: the layout transformation is for logical cores of {layout.lnc}, this process has {lnc}")


def allocate(owner, core, tensors, graphs):
    """Count what a model takes of a core, until it is gone. Raises RuntimeError."""
    limit = int(os.environ.get("STANDIN_CORE_BYTES", 16 << 30))
    base = 0 if USED.get(core) else BASE_BYTES
    size = base + graphs * int(os.environ.get("STANDIN_GRAPH_BYTES", GRAPH_BYTES)) + sum(t.numel() * t.dtype.itemsize for t in tensors)
    USED[core] = USED.get(core, 0) + size
    weakref.finalize(owner, _free, core, size)
    if USED[core] > limit:
        raise RuntimeError(f"NRT_RESOURCE (4): Failed to allocate {size} bytes on core {core}: {USED[core]} of {limit}")


def claim(count):
    """This process's cores: those NEURON_RT_VISIBLE_CORES names, locked until it exits. Numbered from 0 inside."""
    visible = os.environ.get("NEURON_RT_VISIBLE_CORES")
    if visible is None:
        raise RuntimeError("nrt_init would take every core: NEURON_RT_VISIBLE_CORES is not set")
    cores = [core for part in visible.split(",") for core in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)]
    if count > len(cores):
        raise RuntimeError(f"{count} ranks and {len(cores)} visible cores")
    folder = Path(os.environ.get("STANDIN_CORES", "/tmp/rayneuron-standin-cores"))
    folder.mkdir(parents=True, exist_ok=True)
    for core in cores:
        if core not in CLAIMED:
            descriptor = os.open(folder / str(core), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RuntimeError(f"Logical Neuron Core(s) not available: {core} is in use by another process") from None
            CLAIMED[core] = descriptor
    return cores


def _free(core, size):
    USED[core] -= size
