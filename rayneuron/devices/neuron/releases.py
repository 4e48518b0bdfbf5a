"""What is known of the Neuron SDK: its releases and the chips they serve, compiler arguments per graph, the legal sizes. Pure.

Sources: SDK release notes and manifest, NxD Inference's model_wrapper.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rayneuron.errors import ConfigError

log = logging.getLogger(__name__)

INDEX = "https://pip.repos.neuron.amazonaws.com"
INSTALL = (
    f"pip install --extra-index-url {INDEX} torch-neuronx==2.9.0.2.12.22436 neuronx-distributed==0.17.26814 "
    "neuronx-cc==2.23.6484.0 libneuronxla==2.2.15515.0"
)
# The system packages of that SDK, by their first two numbers: an image's latest are of a newer one. The driver may be newer.
SYSTEM: Mapping[str, str] = MappingProxyType(
    {"aws-neuronx-runtime-lib": "2.30", "aws-neuronx-collectives": "2.30", "aws-neuronx-tools": "2.28"}
)
SYSTEM_PACKAGES = " ".join(f"'{name}={version}.*'" for name, version in SYSTEM.items())  # as apt-get takes them
# Async mode, as NxD Inference sets it: a step runs and one is queued. The runtime's own default is none: every step would be waited for.
IN_FLIGHT: Mapping[str, str] = MappingProxyType({"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "2", "NEURON_RT_IO_RING_CACHE_SIZE": "2"})
FLOAT8: Mapping[str, str] = MappingProxyType({"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"})  # when traced and when run
LONG_CONTEXT = 32768  # from here on NxD Inference changes arithmetic flags and the scratchpad page
SCRATCHPAD, SCRATCHPAD_MB = "NEURON_SCRATCHPAD_PAGE_SIZE", 1024
LOGICAL = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")  # the second is the older name
VISIBLE, CC_FLAGS, ROOT = "NEURON_RT_VISIBLE_CORES", "NEURON_CC_FLAGS", "NEURON_RT_ROOT_COMM_ID"
_PAGE = "--hbm-scratchpad-page-size"
MOST_CANDIDATES = 1024
_FLOAT8 = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
COMPILER_BYTES, COMPILER_PROCESSORS = 24 << 30, 4  # what one neuronx-cc is given
# What the operator says of these is taken; of all else that we export it is ours that holds, and said where it differs.
PREFERENCES = (
    *("NEURON_RT_EXEC_TIMEOUT", "NEURON_PROCESS_TAG", *IN_FLIGHT),
    *("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE"),
)
# How torch-xla starts one process a core to train: its client would wait for processes that are none of ours.
FOREIGN = ("NEURON_PJRT_PROCESSES_NUM_DEVICES", "NEURON_PJRT_PROCESS_INDEX", "NEURON_PJRT_WORLD_SIZE")
# Ours without a word: cores are derived from what the operator left us, and Ray sets the last itself.
DERIVED = (VISIBLE, "NEURON_RT_NUM_CORES", "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES", "OMP_NUM_THREADS")
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


def check(distributed: str, chip: str, anything: bool = False) -> Release:
    """The release of an installed neuronx-distributed, if it serves models on `chip`; a newer one than is known here is tried with a
    warning on chips that later SDKs are made for, and with `anything` on any. Raises ConfigError with what to install."""
    found = re.match(r"(\d+)\.(\d+)", distributed)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    release, newest = RELEASES.get(version), max(RELEASES)
    if release is None and version > newest and (chip in LNC_CHIPS or anything):
        log.warning(
            "neuronx-distributed %s is newer than every SDK known here (up to %s, neuronx-distributed %d.%d) and was not tried; this "
            "version was written for and tested against SDK %s: if it fails, %s",
            distributed, RELEASES[newest].sdk, *newest, PINNED.sdk, INSTALL,
        )  # fmt: skip
        return Release(f"newer than {RELEASES[newest].sdk}", version, (chip,))
    if release is None:
        raise ConfigError(f"neuronx-distributed {distributed} is of no SDK this version knows; install SDK {PINNED.sdk}: {INSTALL}")
    if chip not in release.chips:
        said = f"SDK {release.sdk} (neuronx-distributed {distributed}) serves models on {', '.join(release.chips)} and not on {chip}"
        if not anything:
            raise ConfigError(f"{said}; install SDK {PINNED.sdk}: {INSTALL}. RAYNEURON_ANY_SDK=1 tries it all the same")
        log.warning("%s, and is tried all the same (RAYNEURON_ANY_SDK=1)", said)
    return release


@dataclass(frozen=True, slots=True)
class CompilerOptions:
    """What a deployment may say to the compiler.

    optimization: -O of every graph, None for 1 on prefill and 2 elsewhere; tiling: parts a prefill's collectives are cut into to overlap
    with compute; mixed_accumulation: accumulate in float32 across partial sums, None for the compiler's own up to LONG_CONTEXT;
    flags: more, appended as they are; workers: compilers at once, None for as many as memory and processors allow; reduce_dtype: of
    sums over ranks, fp32 or the compute dtype (bf16).
    """

    optimization: int | None = None
    tiling: int = 2
    mixed_accumulation: bool | None = None
    flags: str = ""
    workers: int | None = None
    reduce_dtype: str = "fp32"


def workers(memory_bytes: int, processors: int) -> int:
    """Compilers that may run on a host at once: one of a heavy graph was killed for memory on one of 128 GiB (aws-neuron-sdk #1329)."""
    return max(1, min(memory_bytes // COMPILER_BYTES, processors // COMPILER_PROCESSORS))


def compile_minutes(layers: int) -> tuple[float, float]:
    """What one graph may take: a guess, from "30-60 minutes" for two graphs of a large model (optimum-neuron) and small ones in one."""
    return 1 + layers / 40, 5 + layers / 4


def variables(*, float8: bool, length: int, lnc: int, async_mode: bool, flags: str) -> dict[str, str]:
    """What the runtime must be told as the compiler is (or was). `length`: the longest context; `flags`: of the deployment file."""
    out = dict(FLOAT8) if float8 else {}
    page = scratchpad_mb(length, flags)
    if page is not None:
        out[SCRATCHPAD] = str(page)
        if lnc > 1:
            out["NEURON_RT_DBG_SCRATCHPAD_ON_SINGLE_CORE"] = "1"
    return out | dict(IN_FLIGHT) if async_mode else out


def scratchpad_mb(length: int, flags: str) -> int | None:
    """The scratchpad's page: as `flags` name it, else NxD Inference's from LONG_CONTEXT on, None for the compiler's own."""
    named = re.findall(rf"{_PAGE}[= ](\d+)", flags)
    return int(named[-1]) if named else SCRATCHPAD_MB if length >= LONG_CONTEXT else None


def agreed(ours: Mapping[str, str], given: Callable[[str], str | None]) -> tuple[dict[str, str], list[str]]:
    """What to export where the operator may have said something too (`given`), and what to say of it.

    A preference is the operator's; what must be as the graphs were compiled is refused where it contradicts. Raises ConfigError.
    """
    out, notes = dict(ours), []
    for name in FOREIGN:
        if given(name):
            foreign = f"{name}={given(name)} is for one process a core, as training starts them; unset it where Ray starts"
            raise ConfigError(foreign, param=name)
    lnc = ours.get(LOGICAL[0])
    for name in LOGICAL if lnc is not None else ():
        if given(name) not in (None, "", lnc):
            raise ConfigError(
                f"{name}={given(name)} contradicts the deployment, whose instance has logical cores of {lnc}; unset it, or write the "
                f"instance with :lnc{given(name)}", param="instance",
            )  # fmt: skip
    for name, value in ours.items():
        said = given(name)
        if not said or said == value or name in DERIVED:
            continue
        if name in (SCRATCHPAD, *FLOAT8):
            raise ConfigError(f"{name}={said} contradicts how the graphs are compiled, which needs {value}; unset it", param=name)
        if name in PREFERENCES:
            out[name] = said
        notes.append(f"{name}={said} is kept, {value} is the default" if name in PREFERENCES else f"{name}={said} is replaced by {value}")
    page = given(SCRATCHPAD)
    if page and SCRATCHPAD not in ours:
        raise ConfigError(
            f"{SCRATCHPAD}={page} is set and the graphs are compiled without it; unset it, or write compile.flags: {_PAGE}={page}",
            param="compile.flags",
        )
    return out, notes


def parse_visible(text: str) -> tuple[int, ...]:
    """Core numbers of "0,1,2", "0-3" or "0-3,8" as written. Raises ConfigError on anything else, an empty text included."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if match is None:
            raise ConfigError(f"{VISIBLE}={text!r} is no list of cores; write 0,1,2,3", param=VISIBLE)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= first + 1024:
            raise ConfigError(f"{VISIBLE}={text!r}: {first}-{last} is no ascending range of cores; write 0,1,2,3", param=VISIBLE)
        cores.extend(range(first, last + 1))
    return tuple(cores)


def check_bound(bound: tuple[str, str] | None, value: str, name: str) -> None:
    """Refuse cores that the runtime of this process, `bound` to others since its first model, cannot have. Raises ConfigError."""
    if bound is not None and parse_visible(bound[0])[0] != parse_visible(value)[0]:
        raise ConfigError(
            f"{name} was given cores {value}, but this process's Neuron runtime is bound to cores {bound[0]} since it loaded {bound[1]}, "
            f"until the process ends; load {name} in a process of its own",
            param=VISIBLE,
        )


def refuse_flags(said: str | None) -> None:
    """Refuse NEURON_CC_FLAGS: they would reach the compiler, and the compile cache would not know. Raises ConfigError."""
    if said and said.strip():
        raise ConfigError(
            f"{CC_FLAGS}={said!r} is set, which the compile cache cannot know; unset it, and write compile.flags: {said.strip()!r} in the "
            "deployment file (compile.cache for --cache_dir)", param="compile.flags",
        )  # fmt: skip


def logical(chip: str, said: Mapping[str, str | None]) -> int:
    """Physical cores to a logical one where the deployment names no instance: as the operator says, else the chip's own. ConfigError."""
    named = {value for value in said.values() if value}
    allowed = ("2", "1") if chip in LNC_CHIPS else ("1",)
    if len(named) > 1 or not named <= set(allowed):
        words = ", ".join(f"{name}={value}" for name, value in said.items() if value)
        raise ConfigError(f"{words} is not possible on {chip}; write {' or '.join(allowed)}, or unset it", param=LOGICAL[0])
    return int(named.pop() if named else allowed[0])


def arguments(tag: str, length: int, chip: str, lnc: int, float8: bool, options: CompilerOptions) -> str:
    """neuronx-cc's arguments for one graph. `length`: the model's longest context."""
    prefill = tag in ("prefill", "fill")
    level = options.optimization or (1 if prefill else 2)
    tiling = options.tiling if prefill else 1
    out = [
        "--auto-cast=none",
        "--model-type=transformer",
        f"--tensorizer-options='--enable-ccop-compute-overlap --cc-pipeline-tiling-factor={tiling} --vectorize-strided-dma '",
    ]
    if chip in LNC_CHIPS:
        out.append(f"--lnc={lnc}")
    else:
        out.append("--enable-saturate-infinity")  # NxD's own default; needed on these chips alone (CLI reference)
    out.append(f"-O{level}")
    # One option with all that goes into it: two of them do not merge.
    inner = [*(["--modular-flow-mac-threshold=10"] * prefill), *([_FLOAT8] * float8), "--verify-hlo=true"]
    out.append(f"--internal-hlo2tensorizer-options='{' '.join(inner)}'")
    if length >= LONG_CONTEXT:
        out += ["--internal-disable-fma-on-ios", *([] if _PAGE in options.flags else [f"{_PAGE}={SCRATCHPAD_MB}"])]
    mixed = options.mixed_accumulation
    if mixed is False or (mixed is None and length >= LONG_CONTEXT):
        out.append("--disable-mixed-precision-accumulation")
    elif mixed:
        out.append("--enable-mixed-precision-accumulation")
    return " ".join([*out, *([options.flags] if options.flags else [])])
