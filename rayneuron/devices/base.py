"""Device and Collectives: the seam between one model's maths and the processor it runs on.

Shapes: B rows, T new tokens, L attended positions, H KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

FOLLOWS = -1  # as a decode step's token: the id that the row's last step sampled, which the device has kept

Tag = Literal["prefill", "decode", "verify"]
Output = Literal["greedy", "sample", "logits", "scores", "hidden"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One compiled graph: `rows` x `tokens` new tokens that attend the first `length` KV positions.

    `output`: greedy (next ids by argmax), sample (next ids by the row's parameters), logits (as sample, and the last
    token's logits [B, V] for host processors and logprobs), scores (logits of every new token [B, T, V]); hidden (what a pipeline
    stage that is not the last gives to the next, [B, T, E]: known to devices only, since a step asks all stages for the same).
    """

    tag: Tag
    rows: int
    tokens: int
    length: int
    output: Output


@dataclass(slots=True)
class Batch:
    """The inputs of one step, padded to a Shape. Idle rows point at the scratch row, padding tokens at the scratch column.

    tokens, positions [B,T] int32; rows, last [B] int32 (`last`: index of a row's last true token); temperature, top_p, min_p, uniform [B]
    float32; top_k, adapters [B] int32; hidden [B,T,E] where a pipeline stage is not the first.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    last: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    adapters: Tensor
    hidden: Tensor | None = None


@dataclass(slots=True)
class StepOutput:
    """What a step returns: ids [B] int32; complete [B] bool (False: the nucleus left the candidate set, sample that row on the host);
    logits [B,V] or [B,T,V] float32 where the shape asks for them; hidden [B,T,E] where a pipeline stage is not the last."""

    ids: Tensor | None = None
    complete: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None


class Pending(Protocol):
    """A step under way."""

    def wait(self) -> StepOutput:
        """The step's outputs, on the host. Raises what the step raised."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A step that had ended before anybody waited."""

    output: StepOutput

    def wait(self) -> StepOutput:
        """Its outputs."""
        return self.output


Weights = Mapping[str, Any]  # {"top": {name: Tensor}, "layers": [{name: Tensor}, ...]}
Program = Callable[..., StepOutput]  # engine.step.step with the architecture bound
Progress = Callable[[int, int, Shape], None]  # done, total, the shape just made ready


class Device(Protocol):
    """A processor that holds one rank's weights and KV, and runs the listed shapes of one step function."""

    ranks_per_process: int

    def load(self, weights: Weights, kv: Sequence[tuple[int, ...]]) -> None:
        """Take the rank's weights and allocate zeroed KV, one tensor [2, rows, H, length, D] a layer."""

    def compile(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """Make every shape ready to run at full speed. A shape that was not listed is an error afterwards."""

    def run(self, shape: Shape, batch: Batch) -> StepOutput:
        """Run one step; KV is updated in place. Raises CompileError for a shape that was not compiled."""

    def kv_read(self, row: int, start: int, stop: int) -> list[Tensor]:
        """Copy positions [start, stop) of one row: [2, H, stop-start, D] a layer."""

    def kv_write(self, row: int, start: int, values: Sequence[Tensor]) -> None:
        """Write what `kv_read` returned at `start` of one row."""

    def close(self) -> None:
        """Give everything back."""


@runtime_checkable
class Queues(Protocol):
    """A device that takes the next step while one runs. Steps run in order; `run`, `kv_read` and `kv_write` wait for those before them."""

    def start(self, shape: Shape, batch: Batch) -> Pending:
        """Begin one step. A decode step's token may be FOLLOWS. Nobody changes the batch until `wait` has returned."""
