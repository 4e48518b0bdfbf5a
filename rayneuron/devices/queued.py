"""Any device as one that takes the next step while one runs: its steps run in order on a thread of their own.

B rows. For a CPU this costs more than it gains, since the host wants the same cores (figures in README.md here); it is off unless
`compile.async_mode` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from rayneuron.devices.base import Batch, Device, HostKv, KvMemory, Program, Reweighs, Shape, StepOutput, Weights
from rayneuron.devices.neuron.graphs import follow
from rayneuron.models import Progress
from rayneuron.models.kv import KvShape

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step on the thread."""

    future: Future[StepOutput]

    def wait(self) -> StepOutput:
        """Its outputs."""
        return self.future.result()


class Queued:
    """`device` behind a queue."""

    overlaps = True

    def __init__(self, device: Device) -> None:
        self.comm, self.ranks_per_process = device.comm, device.ranks_per_process
        self._device = device
        self._thread = ThreadPoolExecutor(1, "rayneuron-step")
        self._ids = torch.zeros(0, dtype=torch.int32)  # by row: what it sampled last

    def load(self, weights: Weights, kv: KvShape) -> None:
        """As the device."""
        self._ids = torch.zeros(kv.space.rows + 1, dtype=torch.int32)
        self._do(lambda: self._device.load(weights, kv))

    def prepare(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """As the device."""
        self._do(lambda: self._device.prepare(program, shapes, progress))

    def compile(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """As the device, on the thread that will run."""
        self._do(lambda: self._device.compile(program, shapes, progress))

    def start(self, shape: Shape, batch: Batch) -> Waiting:
        """Queue one step."""
        return Waiting(self._thread.submit(self._run, shape, batch))

    def kv_copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As the device, between the steps before and after."""
        self._do(lambda: self._device.kv_copy(pairs))

    def kv_read(self, blocks: Sequence[int]) -> Tensor:
        """As the device, after the steps under way."""
        return self._do(lambda: self._device.kv_read(blocks))

    def kv_write(self, blocks: Sequence[int], values: Tensor) -> None:
        """As the device, after the steps under way."""
        self._do(lambda: self._device.kv_write(blocks, values))

    def kv_memory(self) -> KvMemory:
        """As the device, whose KV is the host's."""
        assert isinstance(self._device, HostKv)
        return self._device.kv_memory()

    def stage_weights(self, weights: Weights) -> None:
        """As the device, between two steps."""
        self._do(lambda: self._reweighs.stage_weights(weights))

    def turn_weights(self) -> None:
        """As the device, between two steps."""
        self._do(lambda: self._reweighs.turn_weights())

    def drop_weights(self) -> None:
        """As the device."""
        self._do(lambda: self._reweighs.drop_weights())

    @property
    def _reweighs(self) -> Reweighs:
        assert isinstance(self._device, Reweighs)
        return self._device

    def close(self) -> None:
        """End the thread, then the device."""
        self._thread.shutdown()
        self._device.close()

    def _do(self, work: Callable[[], Made]) -> Made:
        return self._thread.submit(work).result()

    def _run(self, shape: Shape, batch: Batch) -> StepOutput:
        out = self._device.start(shape, replace(batch, tokens=follow(batch.tokens, self._ids, batch.rows))).wait()
        if out.ids is not None:
            self._ids[batch.rows] = out.ids[:, -1]
        return out
