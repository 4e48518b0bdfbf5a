"""The HLO gate: the graphs that would go to neuronx-cc, lowered by torch-xla on a CPU.

* Every family, kind of graph and option, small: lowered and run. No operator falls back to eager, results and states equal eager torch's.
* Groups of 8 and 32 ranks, lowered: the number of collectives, all of them over all ranks.
* 8B over 8 ranks and 70B over 32, every graph a deployment gets by default and those that verify drafts, lowered from config.json alone
  with two of the layers: bytes of KV that move in a step by the bytes that attention reads, and operations by what arithmetic says.
* The verbs that `rayneuron neuron-check` tries one at a time.
* Nothing on the list of `hlo.denied` anywhere.

    python check.py [--family llama] [--small | --large] [--only adapters] [--part 1/3] [--nxd /path/to/neuronx-distributed/src]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["PJRT_DEVICE"] = "CPU"
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")  # each runs once
os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import hlo  # noqa: E402
import torch  # noqa: E402
import torch_xla  # noqa: E402
import torch_xla.core.xla_model as xm  # noqa: E402
import torch_xla.debug.metrics as metrics  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from rayneuron import models  # noqa: E402
from rayneuron.config import parse  # noqa: E402
from rayneuron.devices.base import DRAFTED, FOLLOWS, HIDDEN, LIKELIEST, LOGITS, NOTHING, SCORES, Shape  # noqa: E402
from rayneuron.devices.idle import idle  # noqa: E402
from rayneuron.devices.neuron import graphs, targets  # noqa: E402
from rayneuron.devices.neuron.targets import WHOLE, Border, Move  # noqa: E402
from rayneuron.engine import draft_step, head_step  # noqa: E402
from rayneuron.engine.buckets import EVERY, inventory  # noqa: E402
from rayneuron.engine.neuron_sampling import NeuronSampling  # noqa: E402
from rayneuron.engine.shelf import Resident  # noqa: E402
from rayneuron.group import pipeline  # noqa: E402
from rayneuron.group.pipeline import Stage  # noqa: E402
from rayneuron.models import head_layers, heads, weights  # noqa: E402
from rayneuron.models.adaptable import modules_of  # noqa: E402
from rayneuron.models.collectives import Solo  # noqa: E402
from rayneuron.models.kv import KvSpace  # noqa: E402
from rayneuron.models.memory import adapter_columns, kv_shape, parameters, share  # noqa: E402
from rayneuron.neuron_check import probes  # noqa: E402
from rayneuron.placement.fitting import capacity_of  # noqa: E402
from rayneuron.placement.memory import arch_of  # noqa: E402
from tests.models import published  # noqa: E402
from tests.models.checkpoint import checkpoint_shapes  # noqa: E402

FAMILIES: dict[str, dict[str, Any]] = json.loads((HERE / "families.json").read_text())
probes.ROWS, probes.VOCAB, probes.LENGTH, probes.HIDDEN, probes.INNER = 4, 2048, 512, 64, 48
SPACE = KvSpace(rows=3, limit=32, blocks=3, block=32)
BLOCKS = KvSpace(rows=3, limit=32, blocks=8, block=8)
DECODE = Shape("decode", 2, 1, 32, LOGITS)
KINDS = (Shape("prefill", 1, 16, 32, LOGITS), DECODE, Shape("verify", 2, 3, 32, EVERY[LOGITS]))
ONCE = (Shape("prefill", 2, 16, 32, LIKELIEST), Shape("decode", 3, 1, 32, LIKELIEST), Shape("prefill", 1, 16, 32, SCORES))
FILL = Shape("fill", 1, 16, 32, NOTHING)
MOVES = (Move("kv_export", 4), Move("kv_import", 4), Move("kv_copy", 4))
STAGES = (  # of async mode, and of the two stages of a pipeline
    *((shape, Border(feedback=True)) for shape in (DECODE, KINDS[0], ONCE[2], MOVES[0])),
    (Shape("prefill", 2, 16, 32, HIDDEN), Border(last=False, hidden=64)),
    (Shape("decode", 2, 1, 32, LOGITS), Border(first=False, hidden=64)),
)
ADAPTED = Border(adapters=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"}, "float8": {"quantization": "f8e4m3"}, "float8 KV": {"kv_dtype": torch.float8_e4m3fn},
    "blocks of 8": {"space": BLOCKS},
    "NxD's sampling": {"rule": NeuronSampling()}, "bfloat16": {"dtype": torch.bfloat16},
}  # fmt: skip
LARGE: dict[str, tuple[int, dict[str, Any]]] = {
    "8B": (8, {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}),
    "70B": (32, {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}),
}
LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
          "rope_theta": 5e5, "torch_dtype": "bfloat16"}  # fmt: skip
LAYERS = 2  # of the large ones that are lowered; all are alike
MOST_MOVED, MOST_FLOPS = 1.1, 1.03


class Checkpoint(Mapping[str, Tensor]):
    """Tensors of the names and shapes a family wants: random ones, or memory nobody has written."""

    def __init__(self, arch: Any, family: Any, empty: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tensors = {
            n: torch.empty(s, dtype=torch.bfloat16) if empty else torch.randn(s, generator=generator) * 0.1
            for n, s in checkpoint_shapes(arch, family)
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Bytes(TorchDispatchMode):
    """Eager CPU, which has no indices of float8 in this release: they are taken of its bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor and (dtype := args[0].dtype).is_floating_point and dtype.itemsize == 1:
            return func(args[0].view(torch.uint8), *args[1:]).view(dtype)
        return func(*args, **(kwargs or {}))


class Groups:
    """Collectives of one group of all ranks, as they go into the graph; the rank is data."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._groups = ranks, [list(range(ranks))]

    def reduce(self, x: Tensor) -> Tensor:
        # Not xm.all_reduce: it leaves the collective out where this process is the only one.
        return torch_xla._XLAC._xla_all_reduce("sum", x.float(), 1.0, self._groups, False).to(x.dtype)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch_xla._XLAC._xla_all_gather(x, dim % x.dim(), self.ranks, self._groups, False, None, None)

    def reduce_scatter(self, x: Tensor, dim: int, computation: str = "sum") -> Tensor:
        wide = xm.reduce_scatter(computation, x.float(), 1.0, dim % x.dim(), self.ranks, self._groups, pin_layout=False)
        return wide.to(x.dtype)

    def share(self, x: Tensor, dim: int) -> Tensor:
        return self.reduce_scatter(x, dim, "max")

    send = receive = broadcast = None  # no verbs of a graph


def graph_of(raw: dict[str, Any], comm: Any, border: Border = WHOLE, **how: Any) -> graphs.Graph:
    """One rank's graph. how: dtype, kv_dtype, quantization, space, rule, arch, empty, sequence_parallel, room (slots and rank of adapters);
    drafts: what makes some in it."""
    if how.get("drafts"):
        return drafting(raw, comm, how["drafts"])
    arch, family, dtype = how.get("arch") or models.architecture(raw), models.family(raw), how.get("dtype", torch.float32)
    stages = 1 if border.first and border.last else 2
    loaded = weights.load(
        arch, family, Checkpoint(arch, family, how.get("empty", False)), dtype=dtype, ranks=comm.ranks, stage=int(not border.first),
        stages=stages, quantization=how.get("quantization"),
    )  # fmt: skip
    kv = kv_shape(arch, how.get("space", SPACE), comm.ranks, len(loaded["layers"]))
    stage = Stage(dtype, border.first, border.last, how.get("sequence_parallel", False))
    border = replace(border, dtype=dtype)
    if border.adapters:
        fill(arch, family, loaded, comm.ranks, dtype, *how.get("room", (3, 8)))
    return graphs.Graph(pipeline.program(arch, stage, how.get("rule")), comm, loaded, kv, how.get("kv_dtype", dtype), border)


def fill(arch: Any, family: Any, loaded: dict[str, Any], ranks: int, dtype: torch.dtype, slots: int, rank: int) -> None:
    """Room for adapters in a rank's weights, full of random ones."""
    first, generator = loaded.get("first", 0), torch.Generator().manual_seed(7)
    how, layers = weights.cut_for(arch, 0, ranks), range(first, first + len(loaded["layers"]))
    Resident([loaded], arch, modules_of(arch, family), [how], layers, dtype, slots=slots, rank=rank)
    for layer in loaded["layers"]:
        layer |= {n: (torch.randn(t.shape, generator=generator) * 0.1).to(dtype) for n, t in layer.items() if "lora" in n}


def drafting(raw: dict[str, Any], comm: Any, kind: str) -> graphs.Graph:
    """One rank's graph of a model with a draft model of other heads, or with heads of some kind, that drafts in its steps."""
    arch, family, dtype = models.architecture(raw), models.family(raw), torch.float32
    held = weights.load(arch, family, Checkpoint(arch, family, False), dtype=dtype, ranks=comm.ranks)
    shape = kv_shape(arch, SPACE, comm.ranks)
    if kind == "model":
        other = models.architecture({**raw, "num_key_value_heads": 1, "num_attention_heads": 2, "num_hidden_layers": 1})
        held["draft"] = weights.load(other, family, Checkpoint(other, family, False), dtype=dtype, ranks=comm.ranks)
        made = replace(shape, draft=kv_shape(other, SPACE, comm.ranks))
        return graphs.Graph(partial(draft_step.step, arch, other), comm, held, made, dtype)
    made_by = {"medusa": published.medusa, "eagle": partial(published.eagle, groups=1), "eagle3": partial(published.eagle3, known=60)}
    said, tensors = made_by[kind](raw)
    data = heads.read(kind, said, {name: tuple(t.shape) for name, t in tensors.items()}, arch)
    held["draft"] = head_layers.load(data, tensors, dtype=dtype, ranks=comm.ranks)
    made = replace(shape, draft=kv_shape(data.arch, SPACE, comm.ranks, data.layers), features=data.width)
    return graphs.Graph(partial(head_step.step, arch, data), comm, held, made, dtype)


def inputs(graph: graphs.Graph, target: targets.Target, top_k: int = 0) -> dict[str, Tensor]:
    """Arguments that differ from row to row."""
    border, space = graph._border, graph.kv.space
    if isinstance(target, Move):
        made = graphs.example(target, graph.kv, next(graph.buffers()).dtype, border)
        for name, first in (("moved", 1), ("source", 0), ("target", 2)):
            if name in made:
                made[name] += (torch.arange(first, first + target.blocks, dtype=torch.int32)).clamp(max=space.scratch)
        if "values" in made:
            made["values"] += 1
        return made
    batch = idle(target, space)
    held = torch.arange(target.rows, dtype=torch.int32)[:, None] * space.width(space.limit) + torch.arange(batch.blocks.shape[1])
    batch.blocks[:] = held.clamp(max=space.blocks - 1)
    batch.positions[:] = torch.arange(target.tokens)
    batch.slots[:] = batch.blocks[:, :1] * space.block + torch.arange(target.tokens) % space.block
    batch.rows[:] = torch.arange(target.rows)
    batch.tokens[:] = torch.arange(1, target.tokens + 1)
    batch.last[:] = target.tokens - 1
    batch.top_k[:] = top_k
    batch.temperature[:], batch.top_p[:], batch.uniform[:] = 0.8, torch.linspace(0.9, 1, target.rows), 0.4
    if border.feedback and target.tokens == 1:
        batch.tokens[1:] = FOLLOWS
    if border.adapters:
        batch.adapters[:] = torch.arange(target.rows) - 1
    if graph.kv.draft is not None and target.tag == "verify":  # one row makes all of its drafts, the others were given theirs
        batch.positions += 4
        batch.slots += 4
        batch.tokens[0, 1:] = DRAFTED - 3
    if not border.first:
        batch.hidden = torch.linspace(-1, 1, border.hidden, dtype=border.dtype).expand(target.rows, target.tokens, -1).contiguous()
    return graphs.pack(batch, target, border)


def lowered(graph: graphs.Graph, target: targets.Target, given: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], hlo.Module]:
    """What the graph gives on XLA's device, not computed yet, and its HLO."""
    device = torch_xla.device()
    graph.shown = target
    graph.to(device)
    moved = {k: t.to(device) for k, t in given.items()}
    torch_xla.sync()
    torch_xla._XLAC._set_all_reduce_token(str(device), None)  # else the collectives of an earlier graph are chained in front
    metrics.clear_all()
    with torch.no_grad():
        out = graph(**moved)
    fallbacks = [c for c in metrics.counter_names() if c.startswith("aten::")]
    assert not fallbacks, f"operators fell back to eager: {fallbacks}"
    module = hlo.Module.of(torch_xla._XLAC._get_xla_tensors_hlo([*out, *graph.buffers()]))
    wrong = hlo.denied(module)
    assert not wrong, f"on the list of what fails: {wrong}"
    return out, module


def moved_bytes(graph: graphs.Graph, module: hlo.Module, target: targets.Target) -> str:
    """Bytes of KV moved, by what one reading takes; AssertionError where a decode step moves more."""
    state = next(graph.buffers())
    kinds = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "f8e4m3fn"}
    moved, others = hlo.kv_moved(module, module.parameters(tuple(state.shape), kinds[state.dtype]))
    if isinstance(target, Move):
        return f"KV {moved / 2**20:.1f} MiB"
    once = 2 * graph.kv.layers * target.rows * graph.kv.heads * target.length * graph.kv.dim * state.dtype.itemsize
    if targets.aligned(target, graph.kv.space, graph._border) and state.dtype.itemsize > 1:
        assert not others, f"KV is copied: {others}"
        # An update writes a row of D numbers a token whatever the length, which shows in the small models only.
        spare = 2 * 2 * graph.kv.layers * target.rows * target.tokens * graph.kv.heads * graph.kv.dim * state.dtype.itemsize
        assert moved <= max(MOST_MOVED * once, once + spare), f"KV moved {moved / once:.2f} times: {others}"
    return f"KV {moved / once:.2f} x once"


def check_one(raw: dict[str, Any], target: targets.Target, border: Border = WHOLE, **how: Any) -> str:
    """Lower and run one small graph; returns what was seen, raises AssertionError where it is wrong."""
    eager, graph = graph_of(raw, Solo(), border, **how), graph_of(raw, Solo(), border, **how)
    given = inputs(eager, target, 3 * ("rule" in how))  # with NxD's, 0 draws evenly, so that a last bit decides
    for one in (eager, graph) if border.feedback else ():
        one.ids += torch.arange(7, 7 + SPACE.rows + 1, dtype=torch.int32)
    eager.shown = target
    with torch.no_grad(), Bytes():
        want = eager(**given)
    out, module = lowered(graph, target, given)
    said = moved_bytes(graph, module, target)
    worst = max(float((a.cpu().float() - b.float()).abs().max()) for a, b in zip(out, want, strict=True))
    worst_kv = max(float((a.cpu().float() - b.float()).abs().max()) for a, b in zip(graph.buffers(), eager.buffers(), strict=True))
    exact = how.get("dtype", torch.float32) == torch.float32 and "kv_dtype" not in how
    assert worst < (1e-4 if exact else 0.1) and worst_kv < (1e-5 if exact else 0.3), f"outputs differ by {worst}, KV by {worst_kv}"
    states = len(list(graph.buffers()))
    return f"{states} states rebound, {len(module.entry)} instructions, {said}, differs by {worst:.1e}, KV by {worst_kv:.1e}"


def check_probe(name: str) -> str:
    """A probe of `rayneuron neuron-check`: lowered, run, and judged as it judges a core."""
    probe, device = probes.ours()[name], torch_xla.device()
    alone = probes.Alone(probe).to(device)
    metrics.clear_all()
    with torch.no_grad():
        out = [*alone(**{n: t.to(device) for n, t in probe.given.items()}), *alone.buffers()]
    fallbacks = [c for c in metrics.counter_names() if c.startswith("aten::")]
    wrong = hlo.denied(hlo.Module.of(torch_xla._XLAC._get_xla_tensors_hlo(out)))
    assert not fallbacks and not wrong, f"fell back to eager: {fallbacks}; on the list of what fails: {wrong}"
    said = probes.judged(probe, [t.cpu() for t in out], 0)
    assert said["right"], said
    return f"off by {said['off']:.0e}, ids by {said['places']}"


def check_groups(ranks: int, sequence_parallel: bool = False, raw: dict[str, Any] | None = None, **how: Any) -> str:
    """Rank 0's graph of a group of `ranks`, lowered only: one replica group of all ranks in every collective."""
    raw = raw or {**FAMILIES["llama"], "num_attention_heads": 32, "num_key_value_heads": 8}
    target = Shape("prefill", 1, 32, 32, LIKELIEST) if sequence_parallel else Shape("decode", 2, 1, 32, LOGITS)
    graph = graph_of(raw, Groups(ranks), how.pop("border", WHOLE), sequence_parallel=sequence_parallel, **how)
    _, module = lowered(graph, target, inputs(graph, target))
    groups = set(re.findall(r"replica_groups=(\{\{[\d,{}]*\}\}|\[[^\]]*\]<=\[[^\]]*\])", module.text))
    assert groups == {"{{" + ",".join(map(str, range(ranks))) + "}}"}, groups
    kinds = {kind: module.counts[kind] for kind in ("all-reduce", "reduce-scatter", "all-gather")}
    layers, padded = 2, raw["vocab_size"] % ranks > 0
    # The embedding, attention and feed-forward, a drawn run; a rank's part of it (and of the padding); the largest two times, shortlist,
    # normaliser, runs. Sequence parallel, and only the likeliest: the shares too, and before both of a layer, the norm and the head.
    wanted = {"all-reduce": 1 + 2 * layers + 1, "reduce-scatter": 1 + padded, "all-gather": 2 + 2 + 1 + 2}
    if sequence_parallel:
        wanted = {"all-reduce": 1, "reduce-scatter": 1 + 2 * layers + padded, "all-gather": 2 * layers + 1 + 2}
    assert how.get("arch") or kinds == wanted, f"{kinds}, not {wanted}"
    return f"{' + '.join(f'{n} {kind}' for kind, n in kinds.items() if n)}, all over 0..{ranks - 1}"


def check_large(raw: dict[str, Any], ranks: int, capacity: Any, target: targets.Target, adapters: int = 0) -> str:
    """One graph of a large model as its deployment gets it, lowered with LAYERS layers; FLOPs by arithmetic, KV moved by KV read once.
    adapters: of rank 16, how many."""
    raw = {**raw, "num_hidden_layers": LAYERS}
    border = ADAPTED if adapters else WHOLE
    graph = graph_of(raw, Groups(ranks), border, dtype=torch.bfloat16, space=capacity.space, empty=True, room=(adapters, 16))
    _, module = lowered(graph, target, graphs.example(target, graph.kv, torch.bfloat16, graph._border))
    said = f"{len(module.entry)} instructions for {LAYERS} layers, {moved_bytes(graph, module, target)}"
    if isinstance(target, Move):
        return said
    arch, tokens = models.architecture(raw), target.rows * target.tokens
    plan, held = share(arch, ranks).plan, parameters(arch, models.family(raw), ranks)
    head = 2 * target.rows * (target.tokens if target.want.at == "all" else 1) * arch.hidden * -(-arch.vocab // ranks)
    columns = adapter_columns(arch, modules_of(arch, models.family(raw)), ranks, range(LAYERS)) * 16 * adapters
    wanted = 2 * tokens * (held.products + columns) + head + 4 * arch.layers * tokens * plan.q_heads * arch.head_dim * target.length
    found = module.dot_flops() / wanted
    assert 1 <= found <= MOST_FLOPS, f"{found:.3f} of the operations that arithmetic says"
    return f"{said}, {module.dot_flops() / 1e9:.1f} GFLOP, {found:.3f} x arithmetic"


def adapted_checks(families: list[str]) -> Iterator[tuple[str, Any]]:
    """Graphs with adapters: of every family, of every kind, of a stage, over small weights, of groups."""
    llama = FAMILIES["llama"]
    yield from ((f"{f} adapters {targets.name(t)}", partial(check_one, FAMILIES[f], t, ADAPTED)) for f in families for t in KINDS[:2])
    more = ((KINDS[2], ADAPTED), (MOVES[0], ADAPTED), *((t, replace(b, adapters=True)) for t, b in STAGES))
    yield from ((f"llama adapters {targets.name(t)} {said(b)}", partial(check_one, llama, t, b)) for t, b in more)
    for name in ("int8", "float8", "bfloat16", "blocks of 8"):
        yield f"llama adapters {name} {targets.name(DECODE)}", partial(check_one, llama, DECODE, ADAPTED, **OPTIONS[name])
    yield from ((f"llama adapters, {n} ranks", partial(check_groups, n, border=ADAPTED)) for n in (8, 32))


def checks(families: list[str], small: bool, large: bool) -> Iterator[tuple[str, Any]]:
    """Every check by its name."""
    if small:
        yield from ((f"{f} {targets.name(t)}", partial(check_one, FAMILIES[f], t)) for f in families for t in KINDS)
        llama, moe = FAMILIES["llama"], {**FAMILIES["mixtral"], "num_local_experts": 4}
        yield from ((f"llama {targets.name(t)}", partial(check_one, llama, t)) for t in (*ONCE, *MOVES))
        yield from ((f"llama {targets.name(t)} {said(b)}", partial(check_one, llama, t, b)) for t, b in STAGES)
        yield from ((f"llama {n} {targets.name(t)}", partial(check_one, llama, t, **o)) for n, o in OPTIONS.items() for t in KINDS[:2])
        small = {"mixtral": moe, "gpt_oss": FAMILIES["gpt_oss"]}  # experts of a small dtype, with and without biases
        for family, raw in small.items():
            yield from ((f"{family} int8 {targets.name(t)}", partial(check_one, raw, t, quantization="int8")) for t in KINDS[:2])
        mixed = {"quantization": "f8e4m3", "kv_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16}
        yield f"gpt_oss float8, float8 KV, bfloat16 {targets.name(DECODE)}", partial(check_one, FAMILIES["gpt_oss"], DECODE, **mixed)
        for kind in ("model", "medusa", "eagle", "eagle3"):
            drawn = [*KINDS, MOVES[2], Shape("verify", 2, 3, 32, EVERY[LIKELIEST]), *([FILL] if kind == "model" else [])]
            yield from ((f"llama drafts by {kind} {targets.name(t)}", partial(check_one, llama, t, drafts=kind)) for t in drawn)
        yield from adapted_checks(families)
        yield from ((f"neuron-check: {n}", partial(check_probe, n)) for n in probes.ours())
        capped = arch_of(parse({"model": {"path": "x"}, "capacity_factor": 1.0}), moe, 1)
        yield "mixtral capacity " + targets.name(KINDS[0]), partial(check_one, moe, KINDS[0], arch=replace(capped, capacity_factor=1.0))
        yield from ((f"llama {n} ranks", partial(check_groups, n)) for n in (8, 32))
        yield from ((f"llama sequence parallel, {n} ranks", partial(check_groups, n, True)) for n in (8, 32))
        split = {**llama, "num_attention_heads": 8, "num_key_value_heads": 2}
        made = arch_of(parse({"model": {"path": "x"}, "shard_over_sequence": True, "tensor_parallel": 8}), split, 8)
        yield "llama shard_over_sequence, 8 ranks", partial(check_groups, 8, raw=split, arch=made)
    for name, (ranks, more) in LARGE.items() if large else ():
        raw = {**LLAMA3, **more}
        given = {"device": "neuron", "tensor_parallel": ranks, "max_model_len": 8192, "max_num_seqs": 32}
        config = parse({"model": {"path": "x"}, **given, "speculative_config": {"method": "ngram"}})
        capacity = capacity_of(config, raw)
        for target in targets.targets(inventory(capacity), capacity.space):
            yield f"{name}, {ranks} ranks {targets.name(target)}", partial(check_large, raw, ranks, capacity, target)
        for target in [t for t in targets.targets(inventory(capacity), capacity.space) if t.tag == "decode"][-1:]:
            yield f"{name}, {ranks} ranks, 8 adapters {targets.name(target)}", partial(check_large, raw, ranks, capacity, target, 8)


def said(border: Border) -> str:
    return "async" if border.feedback else "" if border.first and border.last else "stage 0" if border.first else "stage 1"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--small", action="store_true", help="only the small graphs")
    parser.add_argument("--large", action="store_true", help="only 8B and 70B")
    parser.add_argument("--only", default="", help="checks with this in their names: adapters")
    parser.add_argument("--nxd", type=Path, help="src folder of a neuronx-distributed checkout")
    parser.add_argument("--part", default="1/1", help="of all checks one of so many equal parts, one after another")
    args = parser.parse_args()
    passed = failed = 0
    listed = [(n, c) for n, c in checks(args.family or list(FAMILIES), not args.large, not args.small) if args.only in n]
    part, parts = map(int, args.part.split("/"))
    listed = listed[len(listed) * (part - 1) // parts : len(listed) * part // parts]
    if args.nxd:
        import sharding

        listed.append(("shard_checkpoint of NxD", partial(sharding.check, args.nxd)))
    commit = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False).stdout
    versions = f"commit {commit.strip() or 'unknown'}, torch {torch.__version__}, torch-xla {torch_xla.__version__}"
    print(f"# Run of {time.strftime('%Y-%m-%d')}, part {args.part}: {len(listed)} checks, {versions}.", flush=True)
    for name, check in listed:
        started = time.perf_counter()
        try:
            print(f"ok    {name:<52} {check()} ({time.perf_counter() - started:.1f} s)", flush=True)
            passed += 1
        except AssertionError as problem:
            print(f"WRONG {name:<52} {problem}", flush=True)
            failed += 1
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
