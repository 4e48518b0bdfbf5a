"""Our verbs one at a time at the sizes of 8B over 8 ranks; what they avoid; and the SDK's own operators beside them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayneuron.devices.neuron import releases, verbs
from rayneuron.devices.neuron.sdk import Sdk, operator, sdk
from rayneuron.models import adapted, attention
from rayneuron.models.collectives import Solo
from rayneuron.models.kv import KvShape, KvSpace, Places

ROWS, VOCAB, LENGTH, DIM, HIDDEN, INNER = 32, 128256, 8192, 128, 4096, 1792
SLOTS, RANK = 8, 16  # of adapters: as many columns as there are partitions
_RUNS = 20
STATE = "kv"
@dataclass(frozen=True, slots=True)
class Probe:
    """A function of `inputs`, of what the core has `held` since it was loaded, and of a `state` that it gives back last; of nothing else,
    for a tensor it made here would be on another device. `within`: how far its numbers may be off, of the largest; `places`: how far its
    ids; `like`: the probe whose work it also does."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    held: tuple[Tensor, ...] = ()
    state: Tensor | None = None
    within: float = 1e-3
    places: int = 0
    like: str = ""

    @property
    def given(self) -> dict[str, Tensor]:
        """The inputs by name."""
        return dict(zip(("a", "b", "c"), self.inputs, strict=False))

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is held, by name."""
        return {f"w{i}": tensor for i, tensor in enumerate(self.held)}


class Alone(nn.Module):
    """A probe as a model of its own, whose state is a buffer of the root."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self._probe = probe
        for name, tensor in probe.weights.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        if probe.state is not None:
            self.register_buffer(STATE, probe.state)

    def forward(self, a: Tensor | None = None, b: Tensor | None = None, c: Tensor | None = None) -> tuple[Tensor, ...]:
        """Its outputs."""
        held = [getattr(self, name) for name in (*self._probe.weights, *([STATE] if self._probe.state is not None else []))]
        out = self._probe.function(*[x for x in (a, b, c) if x is not None], *held)
        out = out if isinstance(out, tuple) else (out,)
        if self._probe.state is None:
            return out
        setattr(self, STATE, out[-1])
        return out[:-1]


def compiled(found: Sdk, folder: Path, name: str, module: nn.Module, inputs: Mapping[str, Tensor], said: str) -> tuple[Any, Any]:
    """What tracing and compiling a module leave behind."""
    with found["NxDParallelState"](world_size=1, tensor_model_parallel_size=1, lnc_size=lnc(found)):
        traced = found["trace"](module, kwargs=dict(inputs))
    return traced, found["compile"](traced.hlo, traced.metaneff, folder, said, name)


def lnc(found: Sdk) -> int:
    """Physical cores to a logical one, as the chip comes."""
    return 2 if found.chip in releases.LNC_CHIPS else 1


def flags(found: Sdk) -> str:
    """Those of a decode graph."""
    return releases.arguments("decode", 4096, found.chip, lnc(found), False, releases.CompilerOptions())


def ours() -> dict[str, Probe]:
    """What a decode step is made of."""
    kv = KvShape(KvSpace(ROWS, LENGTH, ROWS, LENGTH), 1, 1, DIM)
    ops = verbs.verbs(Solo(), kv, aligned=True, together=True)
    made = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.linspace(-4, 4, VOCAB)[torch.randperm(VOCAB, generator=made)] for _ in range(ROWS)])  # no two alike
    q, k, x = (torch.randn(shape, generator=made).bfloat16() for shape in ((ROWS, 1, 4, DIM), (ROWS, 1, 1, DIM), (ROWS, 1, HIDDEN)))
    store = torch.randn(ROWS + 1, 1, LENGTH + 128, DIM, generator=made).bfloat16()
    zero, narrow = torch.zeros(ROWS, 1), (logits[:, :256].contiguous(),)

    def places(positions: Tensor) -> tuple[Places, Tensor]:
        rows = torch.arange(ROWS, dtype=torch.int32, device=positions.device)[:, None]
        bias = attention.bias(positions, LENGTH, 0, None, torch.bfloat16)
        return Places(positions, rows[:, 0], rows, rows * LENGTH + positions, LENGTH), bias

    def first(q: Tensor, k: Tensor, positions: Tensor, store: Tensor) -> tuple[Tensor, Tensor]:
        at, bias = places(positions)
        kept = ops.write_kv((store, store), at.slots, k, k)
        return ops.attend(q, kept, at.blocks, LENGTH, bias, DIM**-0.5), kept[0]

    def beside(q: Tensor, k: Tensor, positions: Tensor, store: Tensor) -> tuple[Tensor, Tensor]:
        at, bias = places(positions)
        assert ops.attend_one is not None
        out, kept = ops.attend_one(q, (store, store), k, k, at, bias, DIM**-0.5)
        return out, kept[0]

    def adding(x: Tensor, own: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return adapted.linear(ops.linear, own, RANK, {"up.w": w, "up.lora_a": a, "up.lora_b": b}, "up", x)

    sizes = ((INNER, HIDDEN), (HIDDEN, SLOTS * RANK), (SLOTS * RANK, INNER))
    up, down, back = (torch.randn(size, generator=made).bfloat16() / 64 for size in sizes)
    own = torch.arange(ROWS, dtype=torch.int32) % (SLOTS + 1) - 1  # a row in so many has none
    step = (q, k, torch.arange(ROWS, dtype=torch.int32)[:, None] * 100 + 7)
    return {
        "likeliest": Probe(lambda a, x: ops.likeliest(x + a), (zero,), (logits,)),
        "shortlist of 256": Probe(lambda a, x: ops.shortlist(x + a, 256), (zero,), (logits,)),
        "log_sum": Probe(lambda a, x: ops.log_sum(x + a), (zero,), (logits,)),
        # The last bits of a sum decide between neighbours.
        "draw": Probe(lambda a, x: ops.draw(x + a, a[:, 0] + 0.4), (zero,), (logits,), places=2),
        "cumsum of 256": Probe(ops.cumsum, narrow),
        "softmax": Probe(lambda x: x.softmax(-1), narrow),
        "RMS norm": Probe(lambda x, w: ops.norm({"n.w": w}, "n", x, "rms", 1e-5), (x,), (torch.ones(HIDDEN).bfloat16(),), within=2e-2),
        "product": Probe(lambda x, w: ops.linear({"up.w": w}, "up", x), (x,), (up,), within=2e-2),
        "product with adapters": Probe(adding, (x, own), (up, down, back), within=2e-2),
        "attention": Probe(beside, step, state=store, within=2e-2),
        "KV written, then attention": Probe(first, step, state=store, within=2e-2, like="attention"),
    }


def theirs(of: Mapping[str, Probe]) -> dict[str, Probe]:
    """Finding 25: the SDK's own operators on the same inputs, where it has them. As neuronx-distributed calls them."""
    calls: dict[str, tuple[str, Callable[..., Callable[..., Any]]]] = {
        "Argmax": ("likeliest", lambda op: lambda a, x: op.apply(x + a, 1, False)),
        "TopK": ("shortlist of 256", lambda op: lambda a, x: tuple(op.apply(x + a, 256, 1))),
        "Softmax": ("softmax", lambda op: lambda x: op.apply(x, 1)),
        "RmsNorm": ("RMS norm", lambda op: lambda x, w: op.apply(x, w, 1e-5, 2)),
    }
    found = {name: (operator(name), like, call) for name, (like, call) in calls.items()}
    return {name: replace(of[like], function=call(op), like=like) for name, (op, like, call) in found.items() if op is not None}


def avoided() -> dict[str, Probe]:
    """What the verbs are there to avoid: expected to be refused, to take longer, or to give no numbers."""
    logits = torch.linspace(-4, 4, VOCAB).repeat(ROWS, 1)
    q = torch.linspace(-1, 1, ROWS * 4 * 64 * DIM).view(ROWS, 4, 64, DIM).bfloat16()
    return {
        "cumsum of the vocabulary": Probe(lambda x: x.cumsum(-1), (logits,)),
        "argsort of integers": Probe(lambda x: x.argsort(), (torch.arange(4096, dtype=torch.int32),)),
        "where(-inf)": Probe(lambda x: torch.where(x > 0, x, float("-inf")).softmax(-1), (logits,)),
        "scaled_dot_product_attention": Probe(lambda q: F.scaled_dot_product_attention(q, q, q), (q,), within=2e-2),
    }


def measured(folder: Path) -> dict[str, dict[str, Any]]:
    """Every probe on a core, beside what the CPU says of the same numbers: `off`, `places`, `ms` a call, whether that is `right`; or what
    it `failed` with. `like`: whose work it is too; `avoided`: that no graph of ours has it."""
    found, out = sdk(), dict[str, dict[str, Any]]()
    mine, others = ours(), avoided()
    for name, probe in {**mine, **theirs(mine), **others}.items():
        try:
            said = judged(mine.get(probe.like, probe), *_run(found, folder, name, probe))
        except Exception as problem:  # of one operator, whatever the SDK raises; the next may well run
            said = {"failed": str(problem.__cause__ or problem)[:300]}
        out[name] = {**said, "like": probe.like, "avoided": name in others}
    return out


def _run(found: Sdk, folder: Path, name: str, probe: Probe) -> tuple[list[Tensor], float]:
    """Outputs, the state last, and milliseconds of a call."""
    model, tag = found["NxDModel"](1, start_rank=0, local_ranks_size=1), name.replace(" ", "_").replace(",", "")
    model.add(tag, *compiled(found, folder, tag, Alone(probe), probe.given, flags(found)))
    model.set_weights([probe.weights])
    model.to_neuron()
    if probe.state is not None:
        model.write_to_neuron_buffer(probe.state, STATE, 0)
    ranked, took, outputs = {n: [t] for n, t in probe.given.items()}, [], list[Tensor]()
    for _ in range(_RUNS):
        began = time.perf_counter()
        outputs = [ranks[0].cpu() for ranks in model.forward(model_name=tag, forward_mode="ranked", **ranked)]
        took.append(time.perf_counter() - began)
    state = [] if probe.state is None else [model.read_from_neuron_buffer(STATE, 0)]
    return [*outputs, *state], statistics.median(took) * 1000


def judged(probe: Probe, outputs: Sequence[Tensor], ms: float) -> dict[str, Any]:
    """The largest differences from what the same function gives here, of numbers by the largest of them."""
    here, off, places = Alone(probe), 0.0, 0
    with torch.no_grad():
        wanted = [*here(**probe.given), *here.buffers()]
    for got, want in zip(outputs, wanted, strict=True):
        if not want.dtype.is_floating_point:
            places = max(places, int((got.long() - want.long()).abs().max()))
        elif bool(torch.isfinite(got.float()).all()):
            off = max(off, float((got.float() - want.float()).abs().max() / want.float().abs().max()))
        else:
            off = float("inf")
    return {"off": off, "places": places, "ms": ms, "right": off <= probe.within and places <= probe.places}
