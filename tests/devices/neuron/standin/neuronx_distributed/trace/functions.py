"""Stand-in: trace with torch.export, "compile" to a file a graph."""

import inspect
import json
import os
import pickle
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import torch

from neuronx_distributed.trace import compiler, executable, parallel_context
from neuronx_distributed.trace.model_builder_utils import (
    CompilationArtifacts,
    LayoutTransformerArtifacts,
    ModelParamInfo,
    TraceArtifacts,
    WLOArtifacts,
)  # fmt: skip
from neuronx_distributed.trace.nxd_model import runtime

NARROW = (torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8)


def trace(model, args=None, kwargs=None, spmd=True, preserve_parameters=True, weights_to_skip_layout_optimization=None):
    if not spmd:
        raise NotImplementedError("MPMD tracing is not currently supported")
    parallel_context.size()
    parameters = inspect.signature(model.forward).parameters
    for name, parameter in parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise NotImplementedError("Methods with *args or **kwargs are not supported.")
        if parameter.default not in (inspect.Parameter.empty, None):
            raise ValueError(f"Parameter '{name}' has a non-None default value")
    if set(kwargs) - set(parameters):
        raise ValueError(f"Found unexpected keys in kwargs: {set(kwargs) - set(parameters)}")
    if not kwargs:
        raise ValueError("At least one input tensor must be provided via args or kwargs")
    for name, tensor in kwargs.items():
        if tensor.dtype not in NARROW:
            raise RuntimeError(f"input {name} is {tensor.dtype}; the device has none")
    ordered = {n: kwargs[n] for n in parameters if n in kwargs}
    try:
        program, states = executable.exported(model, list(ordered), list(ordered.values()))
        made = executable.Executable.of(program, states, model, ordered)
        meta = made.metaneff()
    except Exception as e:
        raise RuntimeError(f"HLO generation failed: {e}") from e
    return TraceArtifacts(
        hlo=executable.Hlo(made),
        metaneff=meta,
        flattener=SimpleNamespace(layout=tuple(range(len(ordered))), exclude=None),
        packer=SimpleNamespace(layout=None),
        weight_name_to_idx=made.weights,
        weight_names_to_skip=set(weights_to_skip_layout_optimization or ()),
        provided_args=[SimpleNamespace(param_name=n, is_positional=False, tensor=t) for n, t in ordered.items()],
        model_params=[ModelParamInfo(n, p.default is inspect.Parameter.empty) for n, p in parameters.items()],
    )


def compile(hlo_module, metaneff, compiler_workdir=None, compiler_args=None, key=None):
    _given(hlo_module=hlo_module, metaneff=metaneff)
    try:
        return CompilationArtifacts(neff_filepath=_neff(hlo_module, _folder(compiler_workdir, key), _defaults(compiler_args), key))
    except Exception as e:
        raise RuntimeError(f"Compilation failed for {key}") from e


def compile_wlo(hlo_module, metaneff, compiler_workdir=None, compiler_args=None, key=None):
    _given(hlo_module=hlo_module, metaneff=metaneff)
    try:
        flags = " ".join((compiler_args or "").split())  # as the real one rejoins them
        for needed in ("--model-type=transformer", "--enable-internal-neff-wrapper", "--auto-cast=none", "--verbose=35"):
            flags += "" if needed in flags.split() else f" {needed}"
        folder, made = _folder(compiler_workdir, key), hlo_module.executable
        wide = sorted(n for n in made.weights if len(made.shapes[n][0]) == 2 and min(made.shapes[n][0]) > 1) if made.marked else []
        hlo_module.change(turned=frozenset(wide[::2]))
        neff = _neff(hlo_module, folder, flags, key)
        wrapped = folder / "wrapped_neff.hlo"
        if wide:
            wrapped.write_text(json.dumps(wide[::2]))
        return WLOArtifacts(neff_filepath=neff, wrapped_neff_hlo_filepath=str(wrapped) if wide else None)
    except Exception as e:
        raise RuntimeError(f"Compilation failed for priority model {key}") from e


def compile_layout_transformer(wlo_artifacts, priority_model_weight_name_to_idx, compiler_workdir=None, logical_nc_config=1):
    _given(wlo_artifacts=wlo_artifacts, priority_model_weight_name_to_idx=priority_model_weight_name_to_idx)
    if wlo_artifacts.wrapped_neff_hlo_filepath is None:
        return None
    folder = _folder(compiler_workdir, "layout_opt")
    names = json.loads(Path(wlo_artifacts.wrapped_neff_hlo_filepath).read_text())
    files = [folder / name for name in ("graph.hlo", "graph.neff", "metaneff.pb")]
    for file, text in zip(files, ("", json.dumps({"names": names, "lnc": logical_nc_config}), ""), strict=True):
        file.write_text(text)
    return LayoutTransformerArtifacts(*map(str, files))


def _given(**values):
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise ValueError(f"Required compile arguments missing: {', '.join(missing)}")


def _folder(workdir, key):
    folder = Path(workdir or "/tmp/nxd_models") / key / datetime.now().isoformat().replace(":", "-")
    folder.mkdir(parents=True)
    return folder


def _defaults(flags):
    """NxD's own, which flags that are given replace."""
    flags = flags or "--enable-saturate-infinity --auto-cast=none --model-type=transformer -O1"
    for option, default in (("--auto-cast", "--auto-cast=none"), ("-O", "-O1"), ("--verbose", "--verbose=35")):
        flags += "" if option in flags else f" {default}"
    return flags


def _neff(hlo, folder, flags, key):
    log = folder / "log-neuron-cc.txt"
    log.write_text(flags)
    runtime.moment("compile")
    if (seconds := os.environ.get("STANDIN_COMPILE_S")) and subprocess.run(["sleep", seconds], check=False).returncode:
        raise RuntimeError("neuronx-cc: [F137] was forcibly killed - This most commonly occurs due to insufficient system memory.")
    try:
        said = compiler.check(hlo.executable, flags, key)
        if key.startswith(os.environ.get("STANDIN_FAIL_GRAPH", "none of them")):
            raise RuntimeError("neuronx-cc: [F137] was forcibly killed - This most commonly occurs due to insufficient system memory.")
    except RuntimeError as problem:
        log.write_text(f"{flags}\n{problem}")
        raise
    flags = {"lnc": said.lnc, "page": said.page}
    neff = folder / "graph.neff"
    neff.write_bytes(pickle.dumps(replace(hlo.executable, flags=flags, nodes=[])))
    return str(neff)
