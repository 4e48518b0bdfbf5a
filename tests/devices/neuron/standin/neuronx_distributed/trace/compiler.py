"""Stand-in: neuronx-cc. Its options, and the operators it is documented or reported to refuse; codes and words are its own where known."""

import argparse
import math
import os
import re
import shlex

import torch
from torch_neuronx.utils import get_platform_target

WIDEST_SUM = 1024  # of a cumulative sum, which lowers to a reduce-window as wide as its input
LARGEST_K = 16384
FLOAT8 = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
TENSORIZER = ("--enable-ccop-compute-overlap", "--cc-pipeline-tiling-factor=", "--vectorize-strided-dma")
HLO2TENSORIZER = ("--modular-flow-mac-threshold=", "--verify-hlo=", FLOAT8)
TWO_CORE_CHIPS = ("inf2", "trn1", "trn1n")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise RuntimeError(f"neuronx-cc: error: {message}")


def parse(flags):
    """Options of `neuronx-cc compile`, as its CLI reference and NxD Inference have them. Raises RuntimeError."""
    parser = _Parser(prog="neuronx-cc", allow_abbrev=False, add_help=False)
    for name in ("--model-type", "--auto-cast", "--auto-cast-type", "--distribution-strategy", "--logfile", "--verbose",
                 "--tensorizer-options", "--internal-hlo2tensorizer-options", "--internal-backend-options",
                 "--internal-enable-dge-levels"):  # fmt: skip
        parser.add_argument(name)
    parser.add_argument("--lnc", "-lnc", "--logical-nc-config", dest="lnc", type=int)
    parser.add_argument("-O", "--optlevel", dest="level", choices=("1", "2", "3"))
    parser.add_argument("--hbm-scratchpad-page-size", dest="page", type=int)
    for name in ("--enable-mixed-precision-accumulation", "--disable-mixed-precision-accumulation", "--enable-saturate-infinity",
                 "--enable-fast-context-switch", "--enable-fast-loading-neuron-binaries", "--internal-disable-fma-on-ios",
                 "--enable-internal-neff-wrapper"):  # fmt: skip
        parser.add_argument(name, action="store_true")
    given = shlex.split(flags)
    for name in ("--tensorizer-options", "--internal-hlo2tensorizer-options"):
        if sum(part.split("=")[0] == name for part in given) > 1:
            raise RuntimeError(f"neuronx-cc: error: {name} is given twice; they do not merge")
    said = parser.parse_args(given)
    for name, known in (("tensorizer_options", TENSORIZER), ("internal_hlo2tensorizer_options", HLO2TENSORIZER)):
        for part in (getattr(said, name) or "").split():
            if not any(part == option or (option.endswith("=") and part.startswith(option)) for option in known):
                raise RuntimeError(f"neuronx-cc: error: unrecognized arguments: {part} in {name}")
    if get_platform_target() in TWO_CORE_CHIPS and (said.lnc or 1) != 1:
        raise RuntimeError("[NCC_EARG001] Unsupported Logical Neuron Core (LNC) configuration.")
    return said


def check(executable, flags, key=""):
    """Raise RuntimeError for what the compiler does not take."""
    said = parse(flags)
    problems = [problem for node in executable.nodes for problem in refused(node)]
    dtypes = {executable.shapes[name][1] for kind, name in executable.sources if kind in ("weight", "state")}
    if torch.float8_e4m3fn in dtypes:
        if FLOAT8 not in (said.internal_hlo2tensorizer_options or ""):
            problems.append("[NCC_ESPP004] The compiler encountered a data type that is not supported for code generation. f8e4m3fn")
        if os.environ.get("XLA_HANDLE_SPECIAL_SCALAR") != "1" or os.environ.get("UNSAFE_FP8FNCAST") != "1":
            problems.append("f8e4m3 needs XLA_HANDLE_SPECIAL_SCALAR=1 and UNSAFE_FP8FNCAST=1 when it is traced")
    for kind, value in executable.sources:
        if kind == "constant" and value.dtype.is_floating_point and bool(torch.isinf(value).any()):
            problems.append("an infinite constant: -inf is not well supported, NRT 1003 when it runs")
    if problems:
        raise RuntimeError(f"Failed compilation with ['neuronx-cc', 'compile', ...]: {'; '.join(dict.fromkeys(problems))}")
    return said


def refused(node):
    """What is wrong with one operator."""
    name = re.sub(r"^aten\.", "", node.operator).split(".")[0]
    (dtype, shape), *_ = [*node.given, (None, ())]
    whole = dtype is not None and not dtype.is_floating_point
    last = shape[-1] if shape else 0
    if any(d is torch.float64 for d, _ in (*node.given, *node.made)):
        yield f"[NCC_ESPP004] The compiler encountered a data type that is not supported for code generation. f64 in {node.operator}"
    if any(isinstance(value, float) and math.isinf(value) for value in node.scalars):
        yield f"an infinite constant in {node.operator}: -inf is not well supported, NRT 1003 when it runs"
    if name in ("sort", "argsort", "msort", "searchsorted", "bucketize"):
        yield f"[NCC_EVRF013] TopK does not support int32 or int64 input tensors. {node.operator}" if whole else (
            f"[NCC_EVRF001] An unsupported operator was used. {node.operator}")  # fmt: skip
    if name == "topk":
        if whole:
            yield f"[NCC_EVRF013] TopK does not support int32 or int64 input tensors. {node.operator}"
        if max((s for s in node.scalars if isinstance(s, int)), default=0) > LARGEST_K:
            yield f"[NCC_EVRF014] TopK does not support a k larger than {LARGEST_K}. {node.operator}"
    if name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        dim = next((s for s in node.scalars if isinstance(s, int)), -1)
        wide = shape[dim] if shape else 0
        if wide > WIDEST_SUM or whole:
            yield f"{node.operator} of {wide} {dtype}: a reduce-window as wide as its input does not compile (neuronx-cc #767, #778)"
    if name in ("index_add", "scatter_add", "scatter_reduce") and whole:
        yield f"[NCC_EVRF016] The scatter-reduce operation cannot perform reduction logic on integers. {node.operator}"
    if name in ("fft", "linalg", "triangular_solve", "cholesky") or last is None:
        yield f"[NCC_EVRF001] An unsupported operator was used. {node.operator}"
