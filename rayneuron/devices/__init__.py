"""Where graphs run: open a device by its name."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayneuron.devices.base import Device, HostKv, KvMemory, Program, Shape
from rayneuron.devices.neuron.releases import CompilerOptions
from rayneuron.errors import CompileError, ConfigError, RayNeuronError
from rayneuron.models import Progress

if TYPE_CHECKING:
    from rayneuron.compile_cache.cache import Cache
    from rayneuron.devices.staged import Staged

NAMES = ("cpu", "neuron")
# Keys of a deployment's `compile` that mean nothing to a device. The CPU compiles no graphs, and keeps its kernels in a place of its own.
UNHEARD = {"cpu": ("cache", "artifact", "required", "optimization", "tiling", "mixed_accumulation", "flags", "workers", "reduce_dtype")}


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a device that is compiled ahead needs to know beside its rank: which ranks this process drives, and where graphs come from.

    length: the longest context; chip: what the deployment's instance has, None for any; lnc: physical cores a logical one, None for the
    chip's own; cache: a folder or s3://, None for the environment's; required: build nothing; artifact: a folder written by
    `rayneuron compile --out`; first, last, hidden: the pipeline stage, and the size of what passes between stages; float8: weights or
    KV are; model: its name, for messages.
    """

    ranks: int = 1
    start_rank: int = 0
    local_ranks: int | None = None
    length: int = 0
    chip: str | None = None
    lnc: int | None = None
    cache: str | None = None
    required: bool = False
    artifact: Path | None = None
    async_mode: bool = False
    first: bool = True
    last: bool = True
    hidden: int = 0
    options: CompilerOptions = field(default_factory=CompilerOptions)
    float8: bool = False
    model: str = ""

    def opened(self) -> Cache:
        """The compile cache."""
        from rayneuron.compile_cache.cache import Cache

        return Cache(self.cache, require=self.required)


def check_name(name: str) -> None:
    """Raise ConfigError for a device that nobody knows."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        raise ConfigError(f"device {name!r} is unknown; write {near[0] if near else 'one of ' + ', '.join(NAMES)}", param="device")


def installed(name: str) -> bool:
    """Whether what the device needs seems to be on this machine, without importing any of it."""
    return name != "neuron" or importlib.util.find_spec("torch_neuronx") is not None


def imports(name: str) -> tuple[str, ...]:
    """The modules that opening it imports, where a process that has them may be forked: the Neuron runtime's may not."""
    return ("rayneuron.devices.host", "rayneuron.devices.cpu.device") if name != "neuron" else ()


def pads(name: str) -> bool:
    """Whether a step takes the time of its shape, however much of that is padding."""
    return name == "neuron"


def unheard(name: str) -> tuple[str, ...]:
    """Keys of a deployment's `compile` that mean nothing to the device."""
    return UNHEARD.get(name, ())


def check(name: str) -> None:
    """Raise ConfigError for a device that this installation cannot open."""
    check_name(name)
    if name == "neuron":
        from rayneuron import settings
        from rayneuron.devices.neuron import releases
        from rayneuron.devices.neuron.sdk import probe

        releases.refuse_flags(settings.given(releases.CC_FLAGS))
        probe()


def ranks_per_process(name: str) -> int:
    """The most ranks one process of the device drives: on Neuron it drives all its cores of a node, elsewhere one."""
    return 1024 if name == "neuron" else 1


def stages_kv(name: str) -> bool:
    """Whether the device's KV lies where the host cannot address it: what is handed over is copied by its one process."""
    return name == "neuron"


def stage_kv(device: Device, blocks: int, *, shared: bool) -> Staged | None:
    """A place for copies of `blocks` blocks in the host's memory, which others may map if `shared`; None where KV lies there itself."""
    from rayneuron.devices.staged import Staged

    return None if isinstance(device, HostKv) else Staged(device, blocks, shared=shared)


def kv_memory(device: object) -> KvMemory:
    """Where KV can be read. Raises ConfigError where it cannot be."""
    if not isinstance(device, HostKv):
        raise ConfigError("pools hand KV over in host memory, and this device keeps it to itself; leave pools out", param="pools")
    return device.kv_memory()


def open(name: str, *, ahead: Ahead | None = None, **options: Any) -> Device:
    """The device `name`. options: dtype, kv_dtype, threads, comm; `ahead` for one that is compiled ahead. Raises ConfigError."""
    check(name)
    if name == "neuron":
        from rayneuron.devices.neuron.device import Neuron
        from rayneuron.devices.neuron.targets import Border

        a = ahead or Ahead()
        return Neuron(
            dtype=options["dtype"],
            kv_dtype=options.get("kv_dtype"),
            ranks=a.ranks,
            start_rank=a.start_rank,
            local_ranks=a.local_ranks,
            length=a.length,
            chip=a.chip,
            lnc=a.lnc,
            options=a.options,
            cache=a.opened(),
            artifact=a.artifact,
            async_mode=a.async_mode,
            border=Border(a.first, a.last, a.hidden, options["dtype"], a.async_mode),
            float8=a.float8,
            name=a.model,
        )
    from rayneuron.devices.cpu.device import Cpu

    if ahead is not None and ahead.artifact is not None:
        _native().adopt(ahead.artifact, "cpu-kernels")
    if ahead is not None and ahead.async_mode:
        from rayneuron.devices.queued import Queued

        return Queued(Cpu(**options))
    return Cpu(**options)


def built(name: str) -> str:
    """What its compiled code hangs on, in an opened device's process: what was measured with other code says nothing of it."""
    if name == "neuron":
        from rayneuron.devices.neuron.sdk import sdk

        found = sdk()
        return f"{found.chip} {sorted(found.versions.items())}"
    from rayneuron.devices.cpu import library

    kernels = library.library()
    return library.version(kernels) if kernels is not None else "torch"


def build_first(name: str) -> None:
    """Build what every rank of the device needs, if none was ever built on this machine or installed. What fails is for whoever needs it to
    say."""
    from rayneuron.devices.cpu import library

    if name != "neuron" and not any(_native().folder.manifests()):
        with contextlib.suppress(OSError, subprocess.SubprocessError, RayNeuronError):
            library.built(library.best())


def kept(name: str, url: str | None) -> Cache:
    """The cache of what is made once for a device: compiled graphs, kernels, and what their steps take. url: `compile.cache`."""
    from rayneuron.compile_cache.cache import Cache

    return Cache(url) if name == "neuron" else _native()


def precompile(
    name: str, device: Any, program: Program, shapes: Sequence[Shape], tell: Callable[[str], None], progress: Progress
) -> Path:
    """Build what `device`, of that name and with its weights loaded, would build at start, after telling what that is.

    Returns the cache entry's folder. Raises CompileError where nothing can be built.
    """
    if name == "neuron":
        targets = device.targets(shapes)
        tell(device.listing(targets))
        folder: Path = device.artifact(program, targets, progress)
        return folder
    from rayneuron.devices.cpu import library

    counts = ", ".join(f"{sum(s.tag == tag for s in shapes)} {tag}" for tag in dict.fromkeys(s.tag for s in shapes))
    tell(f"the CPU runs its {len(shapes)} shapes ({counts}) with one library of C++ kernels, built once for this processor")
    progress(0, 1)
    try:
        entry = library.entry(library.best())
    except (OSError, subprocess.SubprocessError) as problem:
        raise CompileError(
            f"the C++ kernels cannot be built here ({problem}); install gcc, or run without: torch's own ops are used"
        ) from None
    progress(1, 1)
    return entry


def _native() -> Cache:
    from rayneuron import settings
    from rayneuron.compile_cache.cache import Cache

    return Cache(str(settings.cache_dir() / "native"))
