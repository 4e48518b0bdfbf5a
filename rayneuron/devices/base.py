"""The step contract and the Device: the seam between one model's maths and the processor it runs on.

Shapes: B rows, T new tokens, L attended positions, M blocks of a row, U ids sampled a row, H KV heads, D head size, V vocabulary, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from rayneuron.models import Progress
from rayneuron.models.kv import KvShape, KvSpace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rayneuron.models.adapted import Pairs
    from rayneuron.models.arch import Arch
    from rayneuron.models.collectives import Collectives

FOLLOWS = -1  # as a decode step's token: the id that the row's last step sampled, which the device has kept

# As a verify step's token, and below it: the draft model says what it is. DRAFTED - id: and `id` stands before the row's last known one.
DRAFTED = -2
# In place of one behind the first: it is made only where the draft model was sure of the one before. A graph makes it anyway.
IF_SURE = -(2**31)

Tag = Literal["prefill", "decode", "verify", "fill"]  # fill: a draft model reads, and nothing is returned


@dataclass(frozen=True, slots=True)
class Want:
    """What a step returns: `ids` by argmax (likeliest) or by the rows' parameters (sampled), `logits`, `hidden` states; of every row's last
    true token or of all T; or hidden states `pooled` over its true tokens. `hidden` is what a pipeline stage gives to the next: only
    devices know of it, a step asks all stages alike."""

    ids: Literal["likeliest", "sampled"] | None = None
    logits: bool = False
    hidden: bool = False
    pooled: bool = False
    at: Literal["last", "all"] = "last"

    def __str__(self) -> str:
        return "_".join([*([self.ids] if self.ids else ()), *(n for n in ("logits", "hidden", "pooled") if getattr(self, n)), self.at])


LIKELIEST, SAMPLED = Want("likeliest"), Want("sampled")
LOGITS = Want("sampled", logits=True)  # for host processors and logprobs
SCORES = Want(logits=True, at="all")
POOLED = Want(pooled=True)
NOTHING = Want()
HIDDEN = Want(hidden=True, at="all")


@dataclass(frozen=True, slots=True)
class Shape:
    """One compiled graph: `rows` x `tokens` new tokens that attend the first `length` positions, and what is wanted of them."""

    tag: Tag
    rows: int
    tokens: int
    length: int
    want: Want


def _array(dims: str, dtype: str = "int32", blank: float = 0) -> Any:
    return field(metadata={"dims": dims, "dtype": dtype, "blank": blank})


@dataclass(slots=True)
class Batch:
    """The inputs of one step, padded to a Shape (`schema` gives dims and dtypes).

    Idle rows are row `space.rows`, padding tokens position `space.limit`; both write nowhere. `blocks`: what holds a row, null behind its
    end. `slots`: where each token's KV goes. `last`: index of a row's last true token, -1 where nothing is asked of the row: it is idle,
    or its prompt goes on. `uniform`: a random number for each id sampled. `adapters`: the slot of a row's adapter, -1 for none. `hidden`:
    where a pipeline stage is not the first.
    """

    tokens: Tensor = _array("BT")
    positions: Tensor = _array("BT")
    rows: Tensor = _array("B")
    blocks: Tensor = _array("BM")
    slots: Tensor = _array("BT")
    last: Tensor = _array("B")
    temperature: Tensor = _array("B", "float32")
    top_k: Tensor = _array("B")
    top_p: Tensor = _array("B", "float32", 1)
    min_p: Tensor = _array("B", "float32")
    uniform: Tensor = _array("BU", "float32")
    adapters: Tensor = _array("B", blank=-1)
    hidden: Tensor | None = field(default=None, metadata={"dims": "BTE", "dtype": "", "blank": 0})


@dataclass(slots=True)
class StepOutput:
    """What a step returns: ids [B,U] int32; complete [B] bool (False: the nucleus left the candidate set, sample that row on the host);
    logits [B,V] or [B,T,V] float32 and hidden [B,T,E] where they are wanted; pooled [B,2,E] float32, the hidden state of each row's last
    true token and the sum of all its true ones. A verify step has complete [B,U]; where ops are `dynamic`,
    of its n true tokens alone, one row after another: ids and complete [n], logits [n,V]."""

    ids: Tensor | None = None
    complete: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None
    pooled: Tensor | None = None
    drafts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a Batch: its dims by letter, its dtype ("": the compute dtype), and what idle rows hold."""

    dims: str
    dtype: str
    blank: float


SCHEMA: Mapping[str, Field] = {f.name: Field(**f.metadata) for f in fields(Batch)}


def sizes(name: str, shape: Shape, space: KvSpace, hidden: int = 0) -> tuple[int, ...]:
    """The size of one array of a step's Batch. hidden: the model's E."""
    sampled = shape.tokens if shape.want.at == "all" else 1
    by = {"B": shape.rows, "T": shape.tokens, "M": space.width(shape.length), "E": hidden, "U": sampled}
    return tuple(by[letter] for letter in SCHEMA[name].dims)


def blank(shape: Shape, space: KvSpace) -> dict[str, NDArray[Any]]:
    """The arrays of a Batch of idle rows, without hidden states."""
    import numpy as np  # what judges a deployment file reads the shapes of this module, and has no arrays to make

    special = {"rows": space.rows, "positions": space.limit, "blocks": space.null, "slots": space.nowhere}
    if shape.tag == "verify":
        special["last"] = -1
    return {
        name: np.full(sizes(name, shape, space), special.get(name, f.blank), f.dtype) for name, f in SCHEMA.items() if f.dtype
    }  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class KvRuns:
    """Of each layer of `units`, of each of `blocks` of it: `heads` heads from `head` on, which lie side by side."""

    units: Sequence[NDArray[Any]]
    blocks: Sequence[int]
    head: int
    heads: int


Carried = Callable[[int, int], "NDArray[np.uint64]"]  # XXH3 of runs (first, end), counted layer by layer
Carry = Callable[[KvRuns, KvRuns | None], Carried]  # they are copied into those of the other meanwhile, where there is one


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The KV of one rank where the host can address it: `units` of each layer, uint8 [blocks, heads, bytes of keys and values of a block],
    in the order of numbers that `format` names. `fd`: what another process may map to read, layers `stride` bytes apart; -1: nothing.
    `carry`: what copies and hashes at once, where the device has such a thing."""

    units: Sequence[NDArray[Any]]
    format: str
    fd: int = -1
    stride: int = 0
    carry: Carry | None = None


@runtime_checkable
class HostKv(Protocol):
    """A device whose KV the host can address."""

    def kv_memory(self) -> KvMemory:
        """Where it lies, from the load on."""


@runtime_checkable
class Meets(Protocol):
    """A device inside whose runtime ranks of several processes wait for each other, where only the device can end the wait."""

    def patience(self, load_s: float, step_s: float) -> None:
        """How long loading may do nothing, and how long anything else may take."""

    def abort(self) -> None:
        """End every wait, and compilers at work. For any thread."""


@runtime_checkable
class Adapts(Protocol):
    """A device whose rows may have adapters."""

    def open_adapters(self, arch: Arch, sizes: Sequence[Mapping[str, tuple[int, int]]], slots: int, rank: int) -> None:
        """Make room for `slots` of them, of at most `rank`, after the load and before any step. sizes: `models.lora.sizes`."""

    def pack_adapter(self, adapter: Iterable[Pairs], rest: Callable[[], None]) -> Any:
        """One as the device keeps it on the host, of its layers as they come. For any thread; `rest` is called after every little work."""

    def put_adapter(self, slot: int, adapter: Any) -> None:
        """Have a slot hold what `pack_adapter` has made, between two steps."""


@runtime_checkable
class Reweighs(Protocol):
    """A device that can go on with other weights of the same shapes, between two steps."""

    def stage_weights(self, weights: Weights) -> None:
        """Hold others beside its own."""

    def turn_weights(self) -> None:
        """Go on with those; its own so far lie beside."""

    def drop_weights(self) -> None:
        """Let go of those beside."""


class Device(Protocol):
    """A processor that holds one rank's weights and KV, and runs the listed shapes of one step function.

    `overlaps`: whether `start` returns before the step has ended, so that a decode step's token may be FOLLOWS. Steps run in the order
    they were started, and the KV verbs wait for those before them.
    """

    ranks_per_process: int
    overlaps: bool

    @property
    def comm(self) -> Collectives:
        """The ranks it computes with."""

    def load(self, weights: Weights, kv: KvShape) -> None:
        """Take the rank's weights and allocate zeroed KV."""

    def prepare(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """The part of `compile` that needs no other process: in a group, all have done it before one does the rest."""

    def compile(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """Make every shape ready to run at full speed. A shape that was not listed is an error afterwards."""

    def start(self, shape: Shape, batch: Batch) -> Pending:
        """Begin one step, which writes KV. Nobody changes the batch until `wait` has returned. CompileError: a shape not compiled."""

    def kv_copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), all at once: no block is both."""

    def kv_read(self, blocks: Sequence[int]) -> Tensor:
        """A copy of some blocks: [layers, n, H, 2, columns of a block, D], the local ranks' heads side by side."""

    def kv_write(self, blocks: Sequence[int], values: Tensor) -> None:
        """Write what `kv_read` returned into some blocks."""

    def close(self) -> None:
        """Give everything back."""
