"""A step that runs on the Neuron device, until its outputs are on the host.

B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from rayneuron.devices.base import Shape, StepOutput
from rayneuron.devices.neuron import words
from rayneuron.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Started:
    """A step under way: its outputs [output][rank] are on the device until `wait`."""

    outputs: Sequence[Sequence[Tensor]]
    shape: Shape
    inputs: Mapping[str, Tensor]  # the device may still read them
    vocab: int | None = None
    where: Callable[[], str] = lambda: "the model"  # whose step it is, for messages
    call: Callable[[Callable[[], StepOutput]], StepOutput] = lambda work: work()  # how the runtime is waited for
    drafted: bool = False  # where one that verifies has made its drafts itself, they are the last of its outputs
    seats: Tensor | None = None  # where each row of the batch is in the graph, if not in its own place
    last: Tensor | None = None  # of a step that verifies: the index of each row's last true token

    def wait(self) -> StepOutput:
        """The step's outputs on the host. Logits needed only where a nucleus was cut are fetched only then.

        Raises DeviceError.
        """
        with Running(self.where):
            return self.call(self._fetched)

    def _fetched(self) -> StepOutput:
        want = self.shape.want
        if self.shape.tag == "fill":
            self._rows(self.outputs[0])
            return StepOutput()
        if want.hidden:
            return StepOutput(hidden=self._rows(self.outputs[0]))
        if want.pooled:
            return StepOutput(pooled=self._rows(self.outputs[0]))
        if want.ids is None:
            return StepOutput(logits=self._logits(self.outputs[0]))
        ids = self._rows(self.outputs[0])
        drafts = self._rows(self.outputs[-1]) if self.drafted and self.shape.tag == "verify" else None
        if want.ids == "likeliest":
            return StepOutput(ids=ids, drafts=drafts)
        complete = self._rows(self.outputs[1]).bool()
        if self.last is not None:  # what padding has drawn is not looked at
            complete |= torch.arange(complete.shape[1]) > self.last[:, None]
        unread = not want.logits and bool(complete.all())
        logits = None if unread else self._logits(self.outputs[2])
        return StepOutput(ids=ids, complete=complete, logits=logits, drafts=drafts)

    def _rows(self, ranked: Sequence[Tensor]) -> Tensor:
        """What every rank gives alike."""
        found = ranked[0].cpu()
        return found if self.seats is None else found[self.seats]

    def _logits(self, ranked: Sequence[Tensor]) -> Tensor:
        """The ranks' parts side by side; ranks of several hosts have gathered them."""
        found = torch.cat([part.cpu() for part in ranked], -1)[..., : self.vocab]
        return found if self.seats is None else found[self.seats]


@dataclass(frozen=True, slots=True)
class Running:
    """What the runtime raises inside, with the graph it was running."""

    where: Callable[[], str]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(problem, RuntimeError) and not isinstance(problem, DeviceError):
            raise DeviceError(f"{self.where()} failed: {problem}; {words.advice(problem)}") from problem
