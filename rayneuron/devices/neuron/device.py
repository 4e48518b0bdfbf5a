"""The Neuron device: all local ranks of a tensor-parallel model in one process, over graphs compiled ahead. Not run on hardware.

B rows, T new tokens, H KV heads of a rank, D head size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayneuron import settings
from rayneuron.compile_cache.cache import Cache, Key
from rayneuron.devices.base import HIDDEN, LIKELIEST, SAMPLED, SCORES, Batch, Program, Shape, StepOutput, Weights
from rayneuron.devices.idle import idle
from rayneuron.devices.neuron import artifact, graphs, releases
from rayneuron.devices.neuron.graphs import WHOLE, Border, Graph, Move, Target
from rayneuron.devices.neuron.releases import CompilerOptions
from rayneuron.devices.neuron.sdk import InGraph, build, sdk, start
from rayneuron.errors import CompileError, ConfigError, DeviceError
from rayneuron.models import Progress
from rayneuron.models import ops as plain
from rayneuron.models.kv import KvShape

log = logging.getLogger(__name__)

Item = TypeVar("Item")

MOVED_POSITIONS = 128  # by one graph that moves KV, unless a block has more


@dataclass(frozen=True, slots=True)
class Started:
    """A step under way: its outputs are on the device until `wait`."""

    outputs: Sequence[Tensor]
    shape: Shape
    inputs: Mapping[str, Tensor]  # the device may still read them
    where: str = "the model"  # whose step it is, for messages

    def wait(self) -> StepOutput:
        """The step's outputs on the host. Logits that SAMPLED needs only for a row whose nucleus was cut are fetched only then.

        Raises DeviceError.
        """
        with _running(self.where):
            return self._fetched()

    def _fetched(self) -> StepOutput:
        want = self.shape.want
        if want == HIDDEN:
            return StepOutput(hidden=self.outputs[0].cpu())
        if want == SCORES:
            return StepOutput(logits=self.outputs[0].cpu())
        ids = self.outputs[0].cpu()
        if want == LIKELIEST:
            return StepOutput(ids=ids)
        complete = self.outputs[1].cpu().bool()
        unread = want == SAMPLED and bool(complete.all())
        return StepOutput(ids=ids, complete=complete, logits=None if unread else self.outputs[2].cpu())


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
        self.comm = InGraph(self.sdk, ranks)
        self.start_rank, self.local_ranks = start_rank, local_ranks or ranks
        self.ops = plain.PLAIN
        self.lnc = lnc or releases.logical(self.sdk.chip, {name: settings.given(name) for name in releases.LOGICAL})
        self._export(told(lnc=self.lnc))
        self._cache, self._artifact = cache, artifact
        self._mode = "async" if async_mode else "ranked"
        self.overlaps = async_mode
        self._border = border
        self._model: Any = None
        self._targets: frozenset[Target] = frozenset()
        self._kv: KvShape | None = None
        self._held: list[Weights] = []

    def load(self, weights: Weights, kv: KvShape) -> None:
        """Take the weights of every local rank (`weights["ranks"]`, or one rank's) and the shape of one rank's KV."""
        self._held = list(weights.get("ranks") or [weights])
        if len(self._held) != self.local_ranks:
            raise ValueError(f"weights of {len(self._held)} ranks for {self.local_ranks} local ranks")
        self._kv = kv

    def compile(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """Compile, or find compiled, every graph; load them on the cores; run each once. Raises CompileError, ConfigError."""
        if not self._held:
            raise CompileError("load weights before compiling")
        visible = artifact.check_cores(settings.visible_cores(), self.local_ranks, settings.bound_cores(), self._name)
        targets = self.targets(shapes)
        path = self.artifact(program, targets, progress)
        settings.bind(visible, self._name)
        self._model = start(self.sdk, path, self.start_rank, [dict(graphs.named(w)) for w in self._held], self._name, visible)
        self._targets = frozenset(targets)
        self._held = []
        met: set[Target] = set()
        for i, shape in enumerate(shapes):
            target = graphs.served(shape, self._border)
            if target not in met:
                met.add(target)
                self.start(shape, self._idle(shape)).wait()
            progress(i + 1, len(shapes))
        scratch = self._shape.space.scratch
        self.kv_copy([(scratch, scratch)])
        self.kv_write([scratch], self.kv_read([scratch]))

    def targets(self, shapes: Sequence[Shape]) -> list[Target]:
        """The graphs that serve `shapes`."""
        return graphs.targets(shapes, self._at_once, self._border)

    def listing(self, targets: Sequence[Target]) -> str:
        """What is going to be compiled, for people."""
        weights = sum(t.numel() * t.dtype.itemsize for _, t in graphs.named(self._held[0]))
        return artifact.listing(targets, self._shape.elements * self.kv_dtype.itemsize, weights)

    def key(self, program: Program, targets: Sequence[Target]) -> Key:
        """What the compiled graphs depend on."""
        return artifact.graphs_key(
            program, targets, self._held[0], self._shape, self.kv_dtype, self.comm.ranks, self.lnc, self.sdk.chip, self.sdk.versions,
            {t.tag: self._arguments(t) for t in targets}, self._border.feedback,
        )  # fmt: skip

    def artifact(self, program: Program, targets: Sequence[Target], progress: Progress) -> Path:
        """The folder of the compiled graphs: the artifact the deployment names, or the cache's, compiled if it is nowhere."""
        key = self.key(program, targets)
        if self._artifact is not None:
            return artifact.opened(self._artifact, key)
        return (self._cache or Cache()).get_or_build(
            key,
            lambda draft: self._build(program, targets, draft, progress),
            lambda what, waited_s: progress(0, len(targets)),  # a sign of life, for a group whose other node compiles
        )

    def start(self, shape: Shape, batch: Batch) -> Started:
        """Begin one step. In async mode this returns before the device has finished; KV is updated in order."""
        target = graphs.served(shape, self._border)
        if target not in self._targets:
            raise CompileError(f"{shape} was not listed when this engine started")
        inputs = {n: getattr(batch, n) for n in graphs.input_names(target, self._border)}
        asked = target if target.want == HIDDEN else shape
        outputs = [out[0] for out in self._forward(target, {n: [t] * self.local_ranks for n, t in inputs.items()})]
        return Started(outputs, asked, inputs, self._where(target))

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
        whole = torch.cat(made, 1)[:, : len(blocks)]
        return whole.view(self.kv_dtype) if self.kv_dtype.itemsize == 1 else whole

    def kv_write(self, blocks: Sequence[int], values: Tensor) -> None:
        """Write what `kv_read` returned."""
        values = values.view(torch.uint8) if values.dtype.itemsize == 1 else values.to(self.kv_dtype)
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
    def _at_once(self) -> int:
        return max(1, MOVED_POSITIONS // self._shape.space.block)

    def _parts(self, items: Sequence[Item], padding: Item) -> Iterator[list[Item]]:
        for at in range(0, len(items), self._at_once):
            part = list(items[at : at + self._at_once])
            yield part + [padding] * (self._at_once - len(part))

    def _move(self, tag: Any, inputs: Mapping[str, Tensor], **ranked: list[Tensor]) -> list[Tensor]:
        """What every local rank gave. Waits for the end: a failure belongs to this call, and the inputs may be given back."""
        same = {n: [t] * self.local_ranks for n, t in inputs.items()}
        move = Move(tag, self._at_once)
        with _running(self._where(move)):
            return [t.cpu() for t in self._forward(move, {**same, **ranked})[0]]

    def stats(self) -> dict[str, Any]:
        """What the runtime says of its cores' memory; empty where it says nothing."""
        runtime = getattr(getattr(torch.classes, "neuron", None), "Runtime", None)
        reader = getattr(runtime(), "get_vnc_memory_stats", None) if runtime else None
        return {"device_memory": reader()} if reader else {}

    def close(self) -> None:
        """Drop the model. The runtime keeps this process's cores until it exits, so a replica ends with its process."""
        self._model, self._held, self._targets = None, [], frozenset()

    def _idle(self, shape: Shape) -> Batch:
        batch = idle(shape, self._shape.space)
        if not self._border.first:
            batch.hidden = torch.zeros(shape.rows, shape.tokens, self._border.hidden, dtype=self._border.dtype)
        return batch

    def _forward(self, target: Target, ranked: Mapping[str, list[Tensor]]) -> list[list[Tensor]]:
        """Outputs [output][local rank]. The name is always given: graphs of several lengths have inputs of one shape."""
        if self._model is None:
            raise CompileError("this device is closed, or nothing was compiled yet")
        with _running(self._where(target)):
            outputs: list[list[Tensor]] = self._model.forward(model_name=graphs.name(target), forward_mode=self._mode, **ranked)
        return outputs

    def _where(self, target: Target) -> str:
        return f"{self._name}: {graphs.bucket(target)} on cores {settings.visible_cores()}"

    def _export(self, ours: Mapping[str, str]) -> None:
        values, notes = releases.agreed(ours, settings.given)
        for note in notes:
            log.info("%s: %s", self._name, note)
        settings.export(values)

    def _arguments(self, target: Target) -> str:
        dtypes = {self.kv_dtype, *(t.dtype for _, t in graphs.named(self._held[0]))}
        float8 = any(d.is_floating_point and d.itemsize == 1 for d in dtypes)
        return releases.arguments(target.tag, self._length, self.sdk.chip, self.lnc, float8, self._options)

    def _build(self, program: Program, targets: Sequence[Target], draft: Path, progress: Progress) -> None:
        graph = Graph(program, self.ops, self.comm, self._held[0], self._shape, self.kv_dtype, self._border)
        examples = [graphs.example(t, self._shape, self.kv_dtype, self._border) for t in targets]
        arguments = {graphs.name(t): self._arguments(t) for t in targets}
        key = self.key(program, targets)
        build(
            self.sdk, graph, targets, examples, arguments, (self.comm.ranks, self.lnc), draft,
            lambda n: progress(n, len(targets)), self._name, draft.parents[1] / "failed" / key.digest,
        )  # fmt: skip
        artifact.write(draft, key, targets)


@contextmanager
def _running(where: str) -> Iterator[None]:
    """What the runtime raises, with the graph it was running."""
    try:
        yield
    except DeviceError:
        raise
    except RuntimeError as problem:
        raise DeviceError(f"{where} failed: {problem}; NEURON_RT_LOG_LEVEL=INFO makes the runtime say more") from problem
