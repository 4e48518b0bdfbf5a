"""From traced graphs to a compiled model, over public functions of neuronx-distributed. Not run on hardware.

Its own ModelBuilder runs a compiler a processor, keeps nothing of a list of graphs one of which fails, lays out weights of graphs that
have none (which it refuses), does that for one physical core a logical one, and makes the model for all ranks of the world in one process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rayneuron import settings
from rayneuron.compile_cache import cache as caching
from rayneuron.compile_cache.cache import Cache
from rayneuron.devices.neuron import releases, slots, words
from rayneuron.devices.neuron.ending import Ticker, Unwanted
from rayneuron.devices.neuron.graphs import Graph
from rayneuron.devices.neuron.sdk import MODEL, Sdk
from rayneuron.devices.neuron.targets import Target, bucket, name
from rayneuron.errors import CompileError

log = logging.getLogger(__name__)

LOG = "log-neuron-cc.txt"
_NEFF, _WRAPPED, _METANEFF, _HLO = "graph.neff", "wrapped_neff.hlo", "metaneff.pb", "graph.hlo"
_MOST_SAID, _LAST = 3, 20_000  # graphs that an error names, and characters of the log that are looked at


@dataclass(frozen=True, slots=True)
class World:
    """Ranks of the stage, those one process drives, physical cores of a logical one."""

    ranks: int
    local: int
    lnc: int


@dataclass(frozen=True, slots=True)
class Job:
    """Graphs to compile, with inputs and compiler flags of each target. `model`: its name, for messages; `workers`: compilers at once,
    None for as many as the machine allows."""

    model: str
    targets: Sequence[Target]
    examples: Sequence[dict[str, Tensor]]
    flags: Sequence[str]
    world: World
    workers: int | None

    @property
    def names(self) -> list[str]:
        """The graphs' names, in order."""
        return [name(t) for t in self.targets]


def build(
    sdk: Sdk, graph: Graph, job: Job, draft: Path, work: Path, cache: Cache, progress: Callable[[int], None], stop: Unwanted
) -> None:
    """Trace and compile into `draft`. `work`: where the compiler works, kept on failure; `cache`: where each graph is kept;
    `progress`: graphs compiled so far, told every second.

    Raises CompileError: model, graph, flags, where the log is.
    """
    shutil.rmtree(work, ignore_errors=True)
    compiler = _Compiler(sdk, cache, work, job, stop)
    traced = _traced(sdk, graph, job, progress, stop)
    compiler.run(traced, progress)
    try:
        made = sdk["NxDModel"](job.world.ranks, start_rank=0, local_ranks_size=job.world.local, layout_transformer=compiler.layout)
        for name in job.names:
            made.add(name, traced[name], compiler.neffs[name])
        made.save(str(draft / MODEL))
    except Exception as problem:
        raise CompileError(f"{job.model}: the compiled graphs could not be joined: {_said(problem)}; they are in {work}") from problem
    shutil.rmtree(work, ignore_errors=True)


def _traced(sdk: Sdk, graph: Graph, job: Job, progress: Callable[[int], None], stop: Unwanted) -> dict[str, Any]:
    world, out = job.world, {}
    try:
        state = sdk["NxDParallelState"](world_size=world.ranks, tensor_model_parallel_size=world.ranks, lnc_size=world.lnc)
    except Exception as problem:
        raise CompileError(f"{job.model}: {world.ranks} ranks: {_said(problem)}; write another tensor_parallel") from problem
    with state, Ticker(lambda: progress(0)):
        for name, target, inputs, flags in zip(job.names, job.targets, job.examples, job.flags, strict=True):
            graph.shown = target
            stop.check()
            try:
                out[name] = sdk["trace"](graph, kwargs=inputs)
            except Exception as problem:
                raise CompileError(
                    f"{job.model}: {bucket(target)} could not be traced: {_said(problem)}. {words.compiler_advice(_said(problem))}"
                    f"The compiler was not asked yet. Its flags; {name}: {flags}"
                ) from problem
    return out


class _Compiler:
    """The compiler's work on one job. `neffs` by name, `layout` of the weights (None: as they are), `done`: graphs ready."""

    def __init__(self, sdk: Sdk, cache: Cache, work: Path, job: Job, stop: Unwanted) -> None:
        self.neffs: dict[str, Any] = {}
        self.layout: Any = None
        self._failed = threading.Event()
        self._sdk, self._cache, self._work, self._job, self._stop = sdk, cache, work, job, stop
        self._flags = dict(zip(job.names, job.flags, strict=True))
        self._most = max(job.workers or 1, releases.workers(*resources()))  # of this machine, where other models may compile too

    @property
    def done(self) -> int:
        return len(self.neffs)

    def run(self, traced: Mapping[str, Any], progress: Callable[[int], None]) -> None:
        """The first decode graph decides the layout of the weights, for all; then the others, a few at a time. Raises CompileError.

        After a failure no graph is begun; those under way are finished and kept. What `progress` raises ends them.
        """
        first = self._priority(traced)
        with ThreadPoolExecutor(self._job.workers or min(self._most, len(traced)), "rayneuron-compile") as pool:
            try:
                if first is not None:
                    self._finished({pool.submit(self._one, first, partial(self._laid, first, traced[first])): first}, progress)
                wlo, rest = self.neffs.get(first or ""), [n for n in traced if n != first]
                made = {n: partial(self._compiled, n, traced[n], traced.get(first or ""), wlo) for n in rest}
                self._finished({pool.submit(self._one, n, make): n for n, make in made.items()}, progress)
            except CompileError:
                raise
            except BaseException:  # the group's loss, Ctrl-C: the pool would compile all that is left of the list first
                self._stop.set()
                raise

    def _finished(self, begun: Mapping[Future[None], str], progress: Callable[[int], None]) -> None:
        """Wait for graphs, with a sign of life every second. Raises CompileError with those that failed."""
        failed: dict[str, Exception] = {}
        left = set(begun)
        while left:
            ended, left = wait(left, 1.0, FIRST_COMPLETED)
            for future in ended:
                problem = future.exception()
                if isinstance(problem, Exception):
                    failed[begun[future]] = problem
                    log.error("%s could not be compiled: %s", begun[future], _said(problem))
                elif begun[future] in self.neffs:
                    log.info("compiled %d of %d graphs", self.done, len(self._job.targets))
            if self._stop.is_set():
                self._stop.set()
            progress(self.done)
        if failed:
            raise self._error(failed)
        self._stop.check()

    def _priority(self, traced: Mapping[str, Any]) -> str | None:
        """The first decode graph, or where that does not use all weights, which the layout's transformer has to know, the first that makes
        drafts. None where neither does."""
        tags = {t.tag: n for n, t in reversed([*zip(self._job.names, self._job.targets, strict=True)])}
        made = [tags[tag] for tag in ("decode", "verify") if tag in tags]
        every = {weight for t in traced.values() for weight in t.weight_name_to_idx}
        whole = next((n for n in made if every <= set(traced[n].weight_name_to_idx)), None)
        if made and whole is None:
            beyond = sorted(every - set(traced[made[0]].weight_name_to_idx))
            log.warning("weights stay laid out as they are, since %s does not use %s", made[0], ", ".join(beyond))
        return whole

    def _laid(self, name: str, traced: Any) -> Any:
        """Compile the graph that decides the layout of the weights, and what lays them out."""
        sdk, flags, lnc = self._sdk, self._flags[name], self._job.world.lnc
        sdk["mark_weights_for_wlo"](traced, traced.weight_names_to_skip)
        entry = self._kept(
            "neff", lambda: _files(sdk["compile_wlo"](traced.hlo, traced.metaneff, self._work, flags, name)),
            hlo=_digest(traced.hlo), flags=flags, decides_layout=True,
        )  # fmt: skip
        wrapped = entry / _WRAPPED
        wlo = sdk["WLOArtifacts"](str(entry / _NEFF), str(wrapped) if wrapped.is_file() else None)
        if wrapped.is_file():
            made = self._kept(
                "layout", lambda: _files(sdk["compile_layout_transformer"](wlo, traced.weight_name_to_idx, self._work, lnc)),
                hlo=hashlib.sha256(wrapped.read_bytes()).hexdigest(), parameters=dict(traced.weight_name_to_idx), lnc=lnc,
            )  # fmt: skip
            self.layout = sdk["LayoutTransformerArtifacts"](*(str(made / n) for n in (_HLO, _NEFF, _METANEFF)))
        return wlo

    def _one(self, name: str, make: Callable[[], Any]) -> None:
        if self._failed.is_set() or self._stop.is_set():
            return
        try:
            with self._stop.compiling():
                self.neffs[name] = make()
        except Exception:
            self._failed.set()
            raise

    def _compiled(self, name: str, traced: Any, first: Any, wlo: Any) -> Any:
        sdk, flags = self._sdk, self._flags[name]
        if wlo is not None and traced.weight_name_to_idx:  # it refuses a graph without weights
            sdk["apply_layout_transformation"](traced, first, wlo, name)
        entry = self._kept(
            "neff", lambda: _files(sdk["compile"](traced.hlo, traced.metaneff, self._work, flags, name)),
            hlo=_digest(traced.hlo), flags=flags, decides_layout=False,
        )  # fmt: skip
        return sdk["CompilationArtifacts"](str(entry / _NEFF))

    def _kept(self, kind: str, make: Callable[[], Sequence[Path]], **fields: Any) -> Path:
        """The cache's entry of a graph, compiled if it is nowhere."""

        def fill(draft: Path) -> None:
            with slots.slot(settings.ledger_dir() / "compilers", self._most, self._stop.check):
                made = make()
            for file in made:
                shutil.copy2(file, draft / file.name)

        key = caching.key(kind, compiler=dict(self._sdk.versions), device=self._sdk.chip, **fields)
        return self._cache.get_or_build(key, fill, lambda what, waited_s: self._stop.check())

    def _error(self, failed: Mapping[str, Exception]) -> CompileError:
        targets = [t for t in self._job.targets if name(t) in failed]
        names, problem = [name(t) for t in targets], failed[name(targets[0])]
        said = ", ".join(bucket(t) for t in targets[:_MOST_SAID])
        more = f" and {len(targets) - _MOST_SAID} more" if len(targets) > _MOST_SAID else ""
        logs = [file for name in names for file in sorted((self._work / name).rglob(LOG))]
        where = f"The compiler's log is {logs[0]}" if logs else f"The compiler wrote no log; its work is in {self._work}"
        do = words.compiler_advice(_said(problem) + "".join(log.read_text(errors="replace")[-_LAST:] for log in logs[:1]))
        kept = f"{self.done} of {len(self._job.targets)} graphs are compiled and kept. "
        flags = "".join(f"; {name}: {self._flags[name]}" for name in names[:_MOST_SAID])
        return CompileError(f"{self._job.model}: {said}{more} could not be compiled: {_said(problem)}. {do}{where}. {kept}Its flags{flags}")


def resources(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> tuple[int, int]:
    """Memory and processors that this process may use; a container's limit counts."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = limit.read_text().strip() if limit.is_file() else ""
    return min(memory_bytes, int(said)) if said.isdigit() else memory_bytes, len(os.sched_getaffinity(0))


def _files(made: Any) -> list[Path]:
    """What the SDK has written of one compilation, and the compiler's log."""
    neff = Path(made.neff_filepath)
    more = [getattr(made, name, None) for name in ("wrapped_neff_hlo_filepath", "metaneff_filepath", "hlo_filepath")]
    return [f for f in (neff, *(Path(m) for m in more if m), neff.parent / LOG) if f.is_file()]


def _digest(hlo: Any) -> str:
    return hashlib.sha256(hlo.SerializeToString(deterministic=True)).hexdigest()


def _said(problem: BaseException) -> str:
    cause = f" ({problem.__cause__})" if problem.__cause__ else ""
    return f"{problem}{cause}"
