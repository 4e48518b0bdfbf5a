"""Stand-in: trace with torch.export, "compile" to a file a graph."""

import inspect
import re
import warnings
from datetime import datetime
from pathlib import Path

import torch

from neuronx_distributed.trace import parallel_context
from neuronx_distributed.trace.nxd_model.nxd_model import Executable, NxDModel, route

FORBIDDEN = ("aten.item", "_local_scalar", "nonzero", "masked_select", "multinomial", "unique")
NARROW = (torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)


class ModelBuilder:
    def __init__(self, model, weights_to_skip_layout_optimization=None):
        self.model = model
        self.traces = {}
        self.world_size = parallel_context._STACK[-1].world_size if parallel_context._STACK else 1

    def trace(self, args=None, kwargs=None, tag=None, spmd=True):
        parallel_context.size()
        parameters = inspect.signature(self.model.forward).parameters
        for name, parameter in parameters.items():
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                raise NotImplementedError("Methods with *args or **kwargs are not supported.")
            if parameter.default not in (inspect.Parameter.empty, None):
                raise ValueError(f"Parameter '{name}' has a non-None default value")
        if set(kwargs) - set(parameters):
            raise ValueError(f"Found unexpected keys in kwargs: {set(kwargs) - set(parameters)}")
        for name, tensor in kwargs.items():
            if tensor.dtype not in NARROW:
                raise RuntimeError(f"input {name} is {tensor.dtype}; the device has none")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, from inside run_decompositions
            program = torch.export.export(self.model, (), dict(kwargs), strict=False).run_decompositions({})
        for node in program.graph.nodes:
            if node.op == "call_function" and any(word in str(node.target) for word in FORBIDDEN):
                raise RuntimeError(f"HLO generation failed: {node.target}")
        ordered = {n: kwargs[n] for n in parameters if n in kwargs}
        self.traces[tag] = (Executable.of(program, self.model, ordered), [(n, p.default is not None) for n, p in parameters.items()])
        return self

    def compile(self, priority_model_key=None, compiler_workdir=None, compiler_args=None, max_workers=None):
        if not self.traces:
            raise ValueError("No traces available for compilation. Call trace() first.")
        if priority_model_key and priority_model_key not in self.traces:
            raise ValueError(f"Invalid priority_model_key: {priority_model_key}")
        if isinstance(compiler_args, dict) and set(self.traces) - set(compiler_args):
            raise ValueError(f"Missing compiler args for buckets: {set(self.traces) - set(compiler_args)}")
        model = NxDModel(self.world_size)
        for key, (executable, parameters) in self.traces.items():
            flags = compiler_args[key] if isinstance(compiler_args, dict) else compiler_args or "-O1"
            check_flags(flags)
            folder = Path(compiler_workdir or "/tmp/nxd_models") / key / datetime.now().isoformat().replace(":", "-")
            folder.mkdir(parents=True)
            (folder / "graph.neff").write_text(executable.module.code)
            (folder / "log-neuron-cc.txt").write_text(flags)
            model.add(key, executable, parameters)
        return model


def check_flags(flags):
    from torch_neuronx.utils import get_platform_target

    if "--auto-cast=none" not in flags or not re.search(r"-O[123]\b", flags):
        raise RuntimeError(f"Compilation failed: {flags}")
    if "--lnc" in flags and get_platform_target() not in ("trn2", "trn3"):
        raise RuntimeError("Compilation failed: --lnc is of Trn2 and later")


__all__ = ["ModelBuilder", "route"]
