"""What is known of the Neuron SDK: its releases and the chips they serve, compiler arguments per graph, the legal sizes. Pure.

Sources: SDK release notes and manifest, NxD Inference's model_wrapper (research/neuron.md A6, I5, §0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rayneuron.errors import ConfigError

INDEX = "https://pip.repos.neuron.amazonaws.com"
INSTALL = (
    f"pip install --extra-index-url {INDEX} torch-neuronx==2.9.0.2.12.22436 neuronx-distributed==0.17.26814 "
    "neuronx-cc==2.23.6484.0 libneuronxla==2.2.15515.0"
)
# Async mode, as NxD Inference sets it: a step runs and one is queued. The runtime's own default is none: every step would be waited for.
IN_FLIGHT: Mapping[str, str] = MappingProxyType({"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "2", "NEURON_RT_IO_RING_CACHE_SIZE": "2"})
LONG_CONTEXT = 32768  # from here on NxD Inference changes arithmetic flags and the scratchpad page
TWO_CORE_CHIPS, LNC_CHIPS = ("inf2", "trn1", "trn1n"), ("trn2", "trn3")


@dataclass(frozen=True, slots=True)
class Release:
    """One SDK release, known by its neuronx-distributed version. `chips`: those it serves models on."""

    sdk: str
    distributed: tuple[int, int]
    chips: tuple[str, ...]


# From the first with ModelBuilder v2 on; 2.26 has only v1, whose graphs keep no readable KV.
RELEASES: Mapping[tuple[int, int], Release] = MappingProxyType(
    {
        r.distributed: r
        for r in (
            Release("2.27", (0, 16), (*TWO_CORE_CHIPS, "trn2", "trn3")),
            Release("2.28", (0, 17), (*TWO_CORE_CHIPS, "trn2", "trn3")),
            Release("2.29", (0, 18), ("trn2", "trn3")),
            Release("2.31", (0, 19), ("trn2", "trn3")),
        )
    }
)
PINNED = RELEASES[0, 17]


def check(distributed: str, chip: str) -> Release:
    """The release of an installed neuronx-distributed, if it serves models on `chip`. Raises ConfigError with what to install."""
    major, _, rest = distributed.partition(".")
    minor = rest.partition(".")[0]
    release = RELEASES.get((int(major), int(minor))) if major.isdigit() and minor.isdigit() else None
    if release is None:
        raise ConfigError(f"neuronx-distributed {distributed} is of no SDK this version knows; install SDK {PINNED.sdk}: {INSTALL}")
    if chip not in release.chips:
        raise ConfigError(
            f"SDK {release.sdk} (neuronx-distributed {distributed}) serves models on {', '.join(release.chips)} and not on {chip}; "
            f"install SDK {PINNED.sdk}: {INSTALL}"
        )
    return release


@dataclass(frozen=True, slots=True)
class CompilerOptions:
    """What a deployment may say to the compiler.

    optimization: -O of every graph, None for 1 on prefill and 2 elsewhere; tiling: parts a prefill's collectives are cut into to overlap
    with compute; mixed_accumulation: accumulate in float32 across partial sums, None for the compiler's own up to LONG_CONTEXT;
    flags: more, appended as they are.
    """

    optimization: int | None = None
    tiling: int = 2
    mixed_accumulation: bool | None = None
    flags: str = ""


def arguments(tag: str, length: int, chip: str, lnc: int, float8: bool, options: CompilerOptions) -> str:
    """neuronx-cc's arguments for one graph. `length`: the model's longest context."""
    prefill = tag == "prefill"
    level = options.optimization or (1 if prefill else 2)
    tiling = options.tiling if prefill else 1
    out = [
        "--auto-cast=none",
        "--model-type=transformer",
        f"--tensorizer-options='--enable-ccop-compute-overlap --cc-pipeline-tiling-factor={tiling} --vectorize-strided-dma '",
    ]
    if chip in LNC_CHIPS:
        out.append(f"--lnc={lnc}")
    out.append(f"-O{level}")
    if prefill:
        out.append("--internal-hlo2tensorizer-options='--modular-flow-mac-threshold=10 --verify-hlo=true'")
    if float8:
        out.append("--experimental-unsafe-fp8e4m3fn-as-fp8e4m3")
    if length >= LONG_CONTEXT:
        out += ["--internal-disable-fma-on-ios", "--hbm-scratchpad-page-size=1024"]
    mixed = options.mixed_accumulation
    if mixed is False or (mixed is None and length >= LONG_CONTEXT):
        out.append("--disable-mixed-precision-accumulation")
    elif mixed:
        out.append("--enable-mixed-precision-accumulation")
    return " ".join([*out, *([options.flags] if options.flags else [])])
