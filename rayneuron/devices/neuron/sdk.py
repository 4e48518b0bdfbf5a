"""The Neuron SDK: the only file that imports torch_neuronx and neuronx_distributed, and only when a device opens. Not run on hardware."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rayneuron import settings
from rayneuron.devices.neuron import releases, words
from rayneuron.devices.neuron.releases import INSTALL
from rayneuron.errors import CompileError, ConfigError, DeviceError, RayNeuronError

MODEL = "model.pt"
MAX = "max"  # torch_xla's REDUCE_MAX
_DISTRIBUTIONS = ("torch-neuronx", "neuronx-distributed", "neuronx-cc", "libneuronxla")
# Where each symbol used here is defined; tests/devices/neuron/symbols.py records their parameters and checks them against the real source.
_SYMBOLS = {
    "trace": "neuronx_distributed.trace.functions",
    "compile": "neuronx_distributed.trace.functions",
    "compile_wlo": "neuronx_distributed.trace.functions",
    "compile_layout_transformer": "neuronx_distributed.trace.functions",
    "mark_weights_for_wlo": "neuronx_distributed.trace.hlo_utils",
    "apply_layout_transformation": "neuronx_distributed.trace.hlo_utils",
    "CompilationArtifacts": "neuronx_distributed.trace.model_builder_utils",
    "WLOArtifacts": "neuronx_distributed.trace.model_builder_utils",
    "LayoutTransformerArtifacts": "neuronx_distributed.trace.model_builder_utils",
    "NxDModel": "neuronx_distributed.trace.nxd_model.nxd_model",
    "NxDParallelState": "neuronx_distributed.trace.parallel_context",
    "reduce_from_tensor_model_parallel_region": "neuronx_distributed.parallel_layers.mappings",
    "_gather_along_dim": "neuronx_distributed.parallel_layers.mappings",
    "_reduce_scatter_along_dim": "neuronx_distributed.parallel_layers.mappings",
    "get_platform_target": "torch_neuronx.utils",
}


@dataclass(frozen=True, slots=True)
class Sdk:
    """The installed SDK: its symbols by name, the chip it compiles for, the versions of its parts."""

    symbols: Mapping[str, Callable[..., Any]]
    chip: str
    versions: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.symbols[name]


def sdk() -> Sdk:
    """Import and check the SDK. Raises ConfigError: absent, an empty package of the public index, or one that does not serve this chip."""
    symbols = {name: _symbol(module, name) for name, module in _SYMBOLS.items()}
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    try:
        chip = str(symbols["get_platform_target"]())
    except Exception as problem:
        raise ConfigError(
            f"this machine has no Neuron chip ({problem}); NEURON_PLATFORM_TARGET_OVERRIDE=inf2 (trn1, trn2) compiles for one"
        ) from None
    releases.check(versions["neuronx-distributed"], chip, settings.any_sdk())
    return Sdk(symbols, chip, versions)


def probe() -> None:
    """Look for the SDK's files without importing it: the runtime reads its environment once, so cores come first. Raises ConfigError."""
    for name, module in _SYMBOLS.items():
        top, _, rest = module.partition(".")
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:  # a module somebody made by hand
            spec = None
        inside = [Path(p).joinpath(*rest.split(".")) for p in (spec.submodule_search_locations or ())] if spec else []
        if not any(p.with_suffix(".py").is_file() or (p / "__init__.py").is_file() for p in inside):
            raise ConfigError(_absent(f"{module}.{name}"))


def imitated() -> bool:
    """Whether the SDK here is the stand-in that tests put in its place."""
    try:
        return (importlib.import_module("torch_neuronx").__doc__ or "").startswith("Stand-in")
    except ModuleNotFoundError:
        return False


def check_driver(efa: bool, root: Path = Path("/")) -> None:
    """Raise ConfigError where there is no device, or no `efa` where ranks of several hosts meet over it: the runtime says so only when
    graphs are loaded, perhaps an hour of compiling later, and may end the process."""
    if imitated():
        return
    if not any((root / "dev").glob("neuron[0-9]*")):
        raise ConfigError(f"this machine shows no Neuron device (/dev/neuron0 and so on). {words.PRESENT}")
    if efa and not any((root / "dev" / "infiniband").glob("uverbs*")):
        raise ConfigError(f"the ranks of several hosts meet over EFA, of which this machine shows no interface. {words.EFA}")


def operator(name: str) -> Any:
    """One of the SDK's own operators (RmsNorm, TopK, ...), which no graph of ours uses; None where it has none of the name."""
    try:
        return getattr(importlib.import_module("torch_neuronx.xla_impl.ops"), name, None)
    except ModuleNotFoundError:
        return None


def _absent(what: str) -> str:
    return (
        f"device neuron needs AWS's own packages, and {what} is not there (those of the public index are empty); "
        f"install SDK {releases.PINNED.sdk} from AWS's repository: {INSTALL}"
    )


def _symbol(module: str, name: str) -> Callable[..., Any]:
    """One symbol, probed for: the packages of these names on the public index import and hold nothing."""
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as problem:
        top = module.split(".")[0]
        if problem.name is not None and problem.name.split(".")[0] not in (top, "torch_neuronx", "libneuronxla", "neuronxcc"):
            raise ConfigError(f"the Neuron SDK needs {problem.name}, which is not installed; pip install {problem.name}") from None
        found = None
    if found is None:
        raise ConfigError(_absent(f"{module}.{name}"))
    return found


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        module: ModuleType | None
        try:
            module = importlib.import_module(distribution.replace("-", "_"))
        except ModuleNotFoundError:
            module = None
        return str(getattr(module, "__version__", "unknown"))


class InGraph:
    """Collectives as part of the traced graph. The rank is data there: one graph serves all of them, so no Python may ask for it."""

    rank: int

    def __init__(self, sdk: Sdk, ranks: int, wide: bool = True) -> None:
        """`wide`: sum in float32, as NxD's layers do unless they are told otherwise."""
        self._sdk, self.ranks, self._wide = sdk, ranks, wide

    def __getattr__(self, name: str) -> Any:
        if name == "rank":
            raise CompileError("a graph for Neuron serves every rank, so a step may not depend on comm.rank; make it a weight")
        raise AttributeError(name)

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        return self._summed(x, self._sdk["reduce_from_tensor_model_parallel_region"]) if self.ranks > 1 else x

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim` in rank order."""
        return self._sdk["_gather_along_dim"](x, dim % x.dim()) if self.ranks > 1 else x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum, then this rank's share of `dim`."""
        return self._summed(x, lambda y: self._sdk["_reduce_scatter_along_dim"](y, dim % x.dim())) if self.ranks > 1 else x

    def _summed(self, x: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        return add(x.float()).to(x.dtype) if self._wide else add(x)

    def share(self, x: Tensor, dim: int) -> Tensor:
        """This rank's equal share of what all ranks hold alike: the largest of equals, so that nobody need know its rank (as NxDI does)."""
        return self._sdk["_reduce_scatter_along_dim"](x, dim % x.dim(), computation=MAX) if self.ranks > 1 else x

    def send(self, x: Tensor, rank: int) -> None:
        raise CompileError("a graph for Neuron cannot send to one rank")

    def receive(self, x: Tensor, rank: int) -> None:
        raise CompileError("a graph for Neuron cannot receive from one rank")

    def broadcast(self, x: Tensor, rank: int) -> None:
        raise CompileError("a graph for Neuron does not broadcast: every rank is given the inputs")


def start(sdk: Sdk, folder: Path, start_rank: int, checkpoints: Sequence[dict[str, Tensor]], name: str, visible: str) -> Any:
    """The compiled model of `folder` on this process's cores, with the weights of the local ranks. Raises CompileError, DeviceError."""
    try:
        model = sdk["NxDModel"].load(str(folder / MODEL), start_rank=start_rank, local_ranks_size=len(checkpoints))
        if not isinstance(model, sdk.symbols["NxDModel"]):  # type: ignore[arg-type]
            raise CompileError(f"{folder / MODEL} was saved by another neuronx-distributed; delete that entry or compile it again")
        model.set_weights(list(checkpoints))
        model.to_neuron()
    except RayNeuronError:
        raise
    except Exception as problem:
        raise DeviceError(
            f"{name}: {len(checkpoints)} ranks could not be loaded on cores {visible} from {folder}: {type(problem).__name__}: {problem}; "
            f"{words.advice(problem)}"
        ) from problem
    return model


def memory_stats() -> dict[str, Any]:
    """What the runtime says of the memory of this process's cores; empty where it says nothing."""
    runtime = getattr(getattr(torch.classes, "neuron", None), "Runtime", None)
    reader = getattr(runtime(), "get_vnc_memory_stats", None) if runtime else None
    return {"device_memory": reader()} if reader else {}
