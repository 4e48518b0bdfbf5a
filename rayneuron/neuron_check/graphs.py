"""What is asked of the SDK without a core: its symbols, what it takes for a state, its flags, and our verbs one at a time."""

from __future__ import annotations

import inspect
import shutil
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rayneuron import settings
from rayneuron.devices.neuron import releases
from rayneuron.devices.neuron.sdk import Sdk, sdk
from rayneuron.neuron_check import probes
from rayneuron.neuron_check.steps import Differs, Item, Machine, NotHere, run

_MOST_S = 60.0  # to compile one verb
_USED: Mapping[str, tuple[str, ...]] = {  # of each function: the parameters that are given by name, or in this order
    "trace": ("model", "kwargs"),
    "compile": ("hlo_module", "metaneff", "compiler_workdir", "compiler_args", "key"),
    "compile_wlo": ("hlo_module", "metaneff", "compiler_workdir", "compiler_args", "key"),
    "compile_layout_transformer": ("wlo_artifacts", "priority_model_weight_name_to_idx", "compiler_workdir", "logical_nc_config"),
    "apply_layout_transformation": ("trace_artifacts", "priority_model_trace_artifacts", "wlo_artifacts", "key"),
    "NxDModel": ("world_size", "start_rank", "local_ranks_size", "layout_transformer"),
    "NxDParallelState": ("world_size", "tensor_model_parallel_size", "lnc_size"),
}


class Rebound(nn.Module):
    """Three lines that change a buffer in one of three ways. `weight`: whether it also reads a parameter."""

    def __init__(self, how: str, weight: bool = True) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("kv_0", torch.zeros(4, 8))
        self.kv = nn.Module()
        self.kv.register_buffer("0", torch.zeros(4, 8))
        self.w = nn.Parameter(torch.ones(8), requires_grad=False) if weight else None

    def forward(self, x: Tensor | None = None) -> Tensor:
        """x [4,8]."""
        assert x is not None
        y = x if self.w is None else x * self.w
        if self.how == "copy":
            self.get_buffer("kv_0").copy_(self.get_buffer("kv_0") + y)
        elif self.how == "root":
            self.kv_0 = self.get_buffer("kv_0") + y
        else:
            setattr(self.kv, "0", self.get_buffer("kv.0") + y)
        return y + 1


def installed(machine: Machine) -> str:
    """Versions, and the chip the SDK is for."""
    found = sdk()
    return f"torch {torch.__version__}, chip {found.chip}, " + ", ".join(f"{n} {v}" for n, v in found.versions.items())


def parameters(machine: Machine) -> str:
    """The functions we call take what we give."""
    found, wrong = sdk(), []
    for name, wanted in _USED.items():
        has = inspect.signature(found[name]).parameters
        wrong += [f"{name} has no {parameter}, but {', '.join(has)}" for parameter in wanted if parameter not in has]
    if wrong:
        raise Differs("; ".join(wrong))
    return f"{len(_USED)} functions as used"


def _traced(found: Sdk, module: nn.Module, inputs: dict[str, Tensor]) -> Any:
    with found["NxDParallelState"](world_size=1, tensor_model_parallel_size=1, lnc_size=1):
        return found["trace"](module, kwargs=inputs)


def _states(traced: Any) -> list[str]:
    inputs = traced.metaneff.input_tensors
    return [i.checkpoint_key.decode() for i in inputs if i.type == type(i).Type.INPUT_STATE or str(i.type).endswith("INPUT_STATE")]


def aliases(machine: Machine) -> str:
    """Probe 9: which of three ways to change a buffer makes it a state."""
    found, seen = sdk(), {}
    for how in ("copy", "root", "nested"):
        try:
            traced = _traced(found, Rebound(how), {"x": torch.ones(4, 8)})
            seen[how] = f"states {_states(traced)}, aliases {dict(traced.metaneff.output_aliases_to)}"
        except Exception as refused:
            seen[how] = f"refused: {refused}"
    said = "; ".join(f"{how}: {what}" for how, what in seen.items())
    if "states ['kv_0']" not in seen["root"]:
        raise Differs(said)
    return said + ("; written in place is a state too: finding 1 was harmless" if "states ['kv_0']" in seen["copy"] else "")


def weightless(machine: Machine) -> str:
    """Probe 10: a graph that only moves KV has no weights, which the layout's transformation refuses."""
    traced = _traced(sdk(), Rebound("root", weight=False), {"x": torch.ones(4, 8)})
    known = dict(traced.weight_name_to_idx)
    return f"weight_name_to_idx {known}" + ("" if not known else ": finding 2 was harmless")


def flags(machine: Machine) -> str:
    """Probe 11: the compiler takes every line of flags that we make."""
    found, tried = sdk(), list[str]()
    lnc = probes.lnc(found)
    settings.export(dict(releases.FLOAT8))
    for tag, length, float8 in (("prefill", 4096, False), ("decode", 4096, False), ("decode", 4096, True), ("prefill", 32768, False)):
        said = releases.arguments(tag, length, found.chip, lnc, float8, releases.CompilerOptions())
        probes.compiled(found, machine.folder / "compiled", f"flags_{len(tried)}", Rebound("root"), {"x": torch.ones(4, 8)}, said)
        tried.append(f"{tag} {length}{' float8' if float8 else ''}")
    return f"taken: {', '.join(tried)}"


def idle(machine: Machine) -> str:
    """Probe 12: tracing and compiling have taken no core."""
    if machine.standin and shutil.which("neuron-ls") is None:
        raise NotHere("a stand-in has no devices")
    said = run(["neuron-ls", "-j"])
    if '"pid"' in said:
        raise Differs(f"a process holds cores: {said[:2000]}")
    return "no process on any device"


def operators(machine: Machine) -> str:
    """Probe 13: each verb compiled alone, in a minute; then the SDK's own, and what they avoid, to learn whether it had to be avoided."""
    found, mine = sdk(), probes.ours()
    times = {name: _seconds(machine, found, name, probe) for name, probe in mine.items()}
    more = {}
    for name, probe in {**probes.theirs(mine), **probes.avoided()}.items():
        try:
            more[name] = f"taken in {_seconds(machine, found, name, probe):.1f} s"
        except Exception as no:
            more[name] = f"refused ({str(no.__cause__ or no)[:160]})"
    text = "; ".join(f"{name} {said}" for name, said in {**{n: f"{took:.1f} s" for n, took in times.items()}, **more}.items())
    slow = [name for name, took in times.items() if took > _MOST_S]
    if slow:
        raise Differs(f"{', '.join(slow)} took more than {_MOST_S:.0f} s; {text}")
    return text


def _seconds(machine: Machine, found: Sdk, name: str, probe: probes.Probe) -> float:
    started = time.monotonic()
    probes.compiled(found, machine.folder / "compiled", name.replace(" ", "_"), probes.Alone(probe), probe.given, probes.flags(found))
    return time.monotonic() - started


SDK = (
    Item(7, "sdk", "import torch_neuronx, neuronx_distributed", "SDK 2.28 and this machine's chip",
         f"{releases.INSTALL} (the packages of these names on the public index are empty)", installed),
    Item(8, "sdk", "inspect.signature of every function used; tests/devices/neuron/test_contract.py is the whole of it",
         "the parameters of 0.17", "install the pinned release", parameters),
)  # fmt: skip
COMPILE = (
    Item(9, "compile", "trace: buffer.copy_, self.buffer = ..., setattr(nested)", "root rebinding is a state, copy_ is none",
         "stop here, and report: no KV can be kept", aliases),
    Item(10, "compile", "trace a graph that reads no weight", "weight_name_to_idx {}", "report", weightless),
    Item(11, "compile", "neuronx-cc with every line of flags: prefill, decode, float8, 32k", "return code 0 each",
         "compile.flags cannot take one away: report which is refused", flags),
    Item(12, "compile", "neuron-ls -j after compiling", "no process", "compile in a container without /dev/neuron*", idle),
    Item(13, "compile", f"each verb alone: [{probes.ROWS}, {probes.VOCAB}], KV of {probes.LENGTH} positions",
         f"at most {_MOST_S:.0f} s each; what they avoid is refused or slower", "report which verb, with its log", operators),
)  # fmt: skip
