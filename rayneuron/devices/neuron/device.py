"""The Neuron device: all local ranks of a tensor-parallel model in one process, over graphs compiled ahead. Not run on hardware.

B rows, T new tokens, H KV heads of a rank, D head size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rayneuron import settings
from rayneuron.compile_cache.cache import Cache, Key
from rayneuron.devices.base import HIDDEN, Batch, Program, Shape, Weights
from rayneuron.devices.neuron import artifact, graphs, pipeline, releases, states
from rayneuron.devices.neuron.calls import Calls
from rayneuron.devices.neuron.ending import Unwanted
from rayneuron.devices.neuron.graphs import Graph
from rayneuron.devices.neuron.releases import CompilerOptions
from rayneuron.devices.neuron.sdk import InGraph, check_driver, memory_stats, sdk, start
from rayneuron.devices.neuron.started import Running, Started
from rayneuron.devices.neuron.targets import WHOLE, Border, Move, Target, aligned, bucket, moved_at_once, name, served, targets
from rayneuron.errors import CompileError, ConfigError
from rayneuron.models import Progress
from rayneuron.models.kv import KvShape

log = logging.getLogger(__name__)

Padded = TypeVar("Padded")
Made = TypeVar("Made")

class Neuron:
    """`ranks` tensor-parallel ranks, of which this process drives `local_ranks` from `start_rank` on. Its cores end with the process."""

    ranks_per_process = 1024

    def __init__(
        self,
        *,
        dtype: Any,
        kv_dtype: Any = None,
        ranks: int = 1,
        start_rank: int = 0,
        local_ranks: int | None = None,
        length: int = 0,
        chip: str | None = None,
        lnc: int | None = None,
        options: CompilerOptions | None = None,
        cache: Cache | None = None,
        artifact: Path | None = None,
        async_mode: bool = False,
        border: Border = WHOLE,
        float8: bool = False,
        name: str = "",
    ) -> None:
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self._length, self._options, self._name = length, options or CompilerOptions(), name or "the model"
        told = partial(releases.variables, float8=float8, length=length, async_mode=async_mode, flags=self._options.flags)
        self._export(told(lnc=lnc or 1))  # before the SDK is imported: the runtime reads it once
        self.sdk = sdk()
        if chip is not None and chip != self.sdk.chip:
            raise ConfigError(
                f"the deployment's instance has {chip}, and the SDK here is for {self.sdk.chip}; correct `instance:`, or compile ahead "
                f"for it with NEURON_PLATFORM_TARGET_OVERRIDE={chip}"
            )
        self.comm = InGraph(self.sdk, ranks, self._options.reduce_dtype == "fp32")
        self.start_rank, self.local_ranks = start_rank, local_ranks or ranks
        self.lnc = lnc or releases.logical(self.sdk.chip, {name: settings.given(name) for name in releases.LOGICAL})
        self._export(told(lnc=self.lnc))
        self._cache, self._artifact = cache or Cache(), artifact
        self._mode, self.overlaps = "async" if async_mode else "ranked", async_mode
        self._border = border
        self._model: Any = None
        self._calls, self._stop = Calls(), Unwanted()
        self._targets: frozenset[Target] = frozenset()
        self._compiled: tuple[Key, Path] | None = None
        self._kv: KvShape | None = None
        self._vocab: int | None = None
        self._wider: dict[Shape, list[Shape]] = {}  # the graphs of more rows than one has, itself first
        self._serving: dict[Shape, tuple[Shape, bool]] = {}  # the graph of a shape, and whether each row of it is a KV row
        self._blank: dict[Shape, dict[str, Tensor]] = {}  # what idle rows are given
        self._held: list[Weights] = []

    def patience(self, load_s: float, step_s: float) -> None:
        """How long loading may do nothing, and how long anything else may take."""
        self._calls.load_s, self._calls.step_s = load_s, step_s

    def abort(self) -> None:
        """End every wait for ranks of other processes, and compilers at work. For any thread."""
        self._calls.abort()
        self._stop.set()

    def load(self, weights: Weights, kv: KvShape) -> None:
        """Take the weights of every local rank (`weights["ranks"]`), or one's to compile with, and the shape of one rank's KV."""
        self._held, self._kv = list(weights.get("ranks") or [weights]), kv
        self._border = replace(self._border, adapters="lora_rank" in self._held[0])

    def prepare(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """Compile, or find compiled, every graph. Raises CompileError, ConfigError."""
        if not self._held:
            raise CompileError("load weights before compiling")
        check_driver(efa=not self._together and settings.variable("FI_PROVIDER") == "efa")
        artifact.check_cores(settings.visible_cores(), self.local_ranks, settings.bound_cores(), self._name)
        self.artifact(program, self.targets(shapes), progress)

    def compile(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """`prepare`; load the graphs on the cores; run each once. Raises CompileError, ConfigError, DeviceError."""
        self.prepare(program, shapes, progress)
        if len(self._held) != self.local_ranks:
            raise ValueError(f"weights of {len(self._held)} ranks for {self.local_ranks} local ranks")
        visible, targets = settings.visible_cores() or "", self.targets(shapes)
        path, weights = self.artifact(program, targets, progress), [dict(graphs.named(w)) for w in self._held]
        settings.bind(visible, self._name)
        load = partial(start, self.sdk, path, self.start_rank, weights, self._name, visible)
        self._model = self._calls.load(load, lambda: progress(0, len(shapes)))  # hundreds of GB, and a meeting of nodes, tell nobody
        self._targets, self._vocab = frozenset(targets), artifact.vocabulary(program)
        self._held = []
        for i, shape in enumerate(shapes):
            target = served(shape, self._border)
            if target not in self._blank:
                self._blank[target] = graphs.example(target, self._shape, self.kv_dtype, self._border)
                self._begin(target, shape, self._blank[target]).wait()
            progress(i + 1, len(shapes))
        for target in self._blank:
            wider = (one for one in self._blank if replace(one, rows=target.rows) == target and one.rows >= target.rows)
            self._wider[target] = sorted(wider, key=lambda one: one.rows)
        scratch = self._shape.space.scratch
        self.kv_copy([(scratch, scratch)])
        self.kv_write([scratch], self.kv_read([scratch]))

    def targets(self, shapes: Sequence[Shape]) -> list[Target]:
        """The graphs that serve `shapes`."""
        return targets(shapes, self._shape.space, self._border)

    def listing(self, targets: Sequence[Target]) -> str:
        """What is going to be compiled, for people."""
        weights = sum(t.numel() * t.dtype.itemsize for _, t in graphs.named(self._held[0]))
        return artifact.listing(targets, states.size(self._held[0], self._shape, self.kv_dtype), weights)

    def key(self, program: Program, targets: Sequence[Target]) -> Key:
        """What the compiled graphs depend on."""
        return artifact.graphs_key(
            program, targets, self._held[0], self._shape, self.kv_dtype, self._world, self.sdk.chip, self.sdk.versions,
            {t.tag: self._arguments(t) for t in targets}, self._border.feedback, self._options.reduce_dtype,
        )  # fmt: skip

    def artifact(self, program: Program, targets: Sequence[Target], progress: Progress) -> Path:
        """The folder of the compiled graphs: the artifact the deployment names, or the cache's, compiled if it is nowhere."""
        key = self.key(program, targets)
        if self._compiled is None or self._compiled[0] != key:
            self._compiled = key, artifact.opened(self._artifact, key) if self._artifact is not None else self._cache.get_or_build(
                key,
                lambda draft: self._build(program, targets, key, draft, progress),
                lambda what, waited_s: progress(0, len(targets)),  # a sign of life, for a group whose other node compiles
            )  # fmt: skip
        return self._compiled[1]

    def start(self, shape: Shape, batch: Batch) -> Started:
        """Begin one step. In async mode this returns before the device has finished; KV is updated in order."""
        target, seated = self._serving.get(shape) or self._served(shape)
        inputs, seats = graphs.pack(batch, target, self._border), None
        if seated:
            target, inputs, seats = self._seated(target, batch.blocks, inputs)
        return self._begin(target, shape, inputs, seats, batch.last if shape.tag == "verify" else None)

    def _served(self, shape: Shape) -> tuple[Shape, bool]:
        target = served(shape, self._border)
        if target not in self._targets and target.want.ids == "likeliest":
            target = replace(target, want=replace(target.want, ids="sampled", logits=True))  # temperature 0 of the graph that samples
        if target not in self._targets:
            raise CompileError(f"{name(target)} was not listed, or this device is closed")
        return self._serving.setdefault(shape, (target, aligned(target, self._shape.space, self._border)))

    def _begin(self, target: Shape, asked: Shape, inputs: Mapping[str, Tensor], *rows: Tensor | None) -> Started:
        outputs = self._forward(target, {n: [t] * self.local_ranks for n, t in inputs.items()})
        if not self._together:
            outputs = [ranked[:1] for ranked in outputs]  # all ranks have the same
        where = partial(self._where, target)
        asked = target if target.want == HIDDEN else asked
        return Started(outputs, asked, inputs, self._vocab, where, self._call, self._shape.draft is not None, *rows)

    def _seated(self, target: Shape, blocks: Tensor, inputs: dict[str, Tensor]) -> tuple[Shape, dict[str, Tensor], Tensor | None]:
        """Every row of a batch at its own KV row, in the smallest graph that reaches it; the rows between are idle. None: all sit there."""
        at, held = blocks[:, 0].tolist(), self._shape.space.blocks
        rows = [block for block in at if block < held]  # a step finds its code in no cache: one call costs what twenty numbers do
        if rows == list(range(len(rows))):
            return target, inputs, None
        if rows != at[: len(rows)]:
            raise ValueError("idle rows of a batch stand behind the others")
        found = next((one for one in self._wider[target] if one.rows > max(rows)), None)
        if found is None:
            raise CompileError(f"no {target.tag} graph reaches KV row {max(rows)}; list max_num_seqs in buckets.batch")
        return found, *graphs.seat(inputs, self._blank[found], rows, len(at))

    def kv_copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks."""
        for part in self._parts(pairs, (self._shape.space.scratch,) * 2):
            source, target = torch.tensor(part, dtype=torch.int32).T.contiguous()
            self._move("kv_copy", {"source": source, "target": target})

    def kv_read(self, blocks: Sequence[int]) -> Tensor:
        """[layers, n, H x local ranks, 2, S, D], the ranks' heads side by side."""
        made = []
        for part in self._parts(blocks, self._shape.space.scratch):
            ranked = self._move("kv_export", {"moved": torch.tensor(part, dtype=torch.int32)})
            made.append(torch.cat([t.cpu() for t in ranked], 2))
        return torch.cat(made, 1)[:, : len(blocks)].to(self.kv_dtype)

    def kv_write(self, blocks: Sequence[int], values: Tensor) -> None:
        """Write what `kv_read` returned."""
        values = values.to(states.carried(self.kv_dtype))
        done = 0
        for part in self._parts(blocks, self._shape.space.scratch):
            these = values[:, done : done + len(part)]
            done += these.shape[1]
            these = torch.nn.functional.pad(these, (0, 0) * 4 + (0, len(part) - these.shape[1]))
            ranked = [t.contiguous() for t in these.chunk(self.local_ranks, 2)]
            self._move("kv_import", {"moved": torch.tensor(part, dtype=torch.int32)}, values=ranked)

    @property
    def _shape(self) -> KvShape:
        if self._kv is None:
            raise CompileError("load weights before anything else")
        return self._kv

    @property
    def _together(self) -> bool:
        return self.local_ranks == self.comm.ranks

    def _parts(self, items: Sequence[Padded], padding: Padded) -> Iterator[list[Padded]]:
        each = moved_at_once(self._shape.space)
        for at in range(0, len(items), each):
            part = list(items[at : at + each])
            yield part + [padding] * (each - len(part))

    def _move(self, tag: Any, inputs: Mapping[str, Tensor], **ranked: list[Tensor]) -> list[Tensor]:
        """What every local rank gave. Waits for the end: a failure belongs to this call, and the inputs may be given back."""
        same = {n: [t] * self.local_ranks for n, t in inputs.items()}
        move = Move(tag, moved_at_once(self._shape.space))
        with Running(partial(self._where, move)):
            given = self._forward(move, {**same, **ranked})[0]
            return self._call(lambda: [t.cpu() for t in given])

    def state(self, name: str, rank: int) -> Tensor:
        """A copy of one local rank's state by its name in the graph: kv_0_k."""
        return cast(Tensor, self._model.read_from_neuron_buffer(name, rank))

    def stats(self) -> dict[str, Any]:
        """What the runtime says of its cores' memory; empty where it says nothing."""
        return memory_stats()

    def close(self) -> None:
        """Drop the model. The runtime keeps this process's cores until it exits, so a replica ends with its process."""
        self._model, self._held, self._targets, self._serving = None, [], frozenset(), {}
        self._calls.close()

    def _call(self, work: Callable[[], Made]) -> Made:
        return work() if self._together else self._calls(work)  # what other processes may hold up can be given up

    def _forward(self, target: Target, ranked: Mapping[str, list[Tensor]]) -> list[list[Tensor]]:
        """Outputs [output][local rank]. The name is always given: graphs of several lengths have inputs of one shape."""
        if (model := self._model) is None:
            raise CompileError("this device is closed, or nothing was compiled yet")
        with Running(partial(self._where, target)):
            made: list[list[Tensor]] = self._call(lambda: model.forward(model_name=name(target), forward_mode=self._mode, **ranked))
        return made

    def _where(self, target: Target) -> str:
        return f"{self._name}: {bucket(target)} on cores {settings.visible_cores()}"

    def _export(self, ours: Mapping[str, str]) -> None:
        values, notes = releases.agreed(ours, settings.given)
        for note in notes:
            log.info("%s: %s", self._name, note)
        settings.export(values)

    def _arguments(self, target: Target) -> str:
        dtypes = {self.kv_dtype, *(t.dtype for _, t in graphs.named(self._held[0]))}
        float8 = any(d.is_floating_point and d.itemsize == 1 for d in dtypes)
        return releases.arguments(target.tag, self._length, self.sdk.chip, self.lnc, float8, self._options)

    @property
    def _world(self) -> pipeline.World:
        return pipeline.World(self.comm.ranks, self.local_ranks, self.lnc)

    def _build(self, program: Program, targets: Sequence[Target], key: Key, draft: Path, progress: Progress) -> None:
        graph = Graph(program, self.comm, self._held[0], self._shape, self.kv_dtype, self._border, together=self._together)
        examples = [graphs.example(t, self._shape, self.kv_dtype, self._border) for t in targets]
        flags = [self._arguments(t) for t in targets]
        job = pipeline.Job(self._name, targets, examples, flags, self._world, self._options.workers)
        work = self._cache.folder.root / "builds" / key.digest
        pipeline.build(self.sdk, graph, job, draft, work, self._cache, lambda n: progress(n, len(targets)), self._stop)
        artifact.write(draft, key, targets)
