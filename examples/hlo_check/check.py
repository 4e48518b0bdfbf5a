"""The HLO gate: the graphs that would go to neuronx-cc, lowered by torch-xla on a CPU.

For every tag: no operator falls back to eager, no dynamic dimension, and the outputs and the states (KV, and in async mode the ids
sampled last) equal eager torch's; also for the stages of a pipeline. For 8 and 32 ranks, with and without sequence parallelism: the
replica groups of every collective. With --nxd PATH (a neuronx-distributed checkout's src): its shard of a row- and a column-parallel
layer equals ours.

    python check.py [--family llama] [--nxd /path/to/neuronx-distributed/src]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

DUMP = tempfile.mkdtemp(prefix="hlo-")
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMP} --xla_dump_hlo_as_text"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch_xla  # noqa: E402
import torch_xla.core.xla_model as xm  # noqa: E402
import torch_xla.debug.metrics as metrics  # noqa: E402
from torch import Tensor  # noqa: E402

from rayneuron import models  # noqa: E402
from rayneuron.devices.base import FOLLOWS, HIDDEN, LIKELIEST, LOGITS, SCORES, Shape  # noqa: E402
from rayneuron.devices.neuron import graphs as graphs  # noqa: E402
from rayneuron.devices.neuron.graphs import WHOLE, Border  # noqa: E402
from rayneuron.group import pipeline  # noqa: E402
from rayneuron.group.pipeline import Stage  # noqa: E402
from rayneuron.models import ops, weights  # noqa: E402
from rayneuron.models.collectives import Solo  # noqa: E402
from rayneuron.models.kv import KvSpace  # noqa: E402
from rayneuron.models.memory import kv_shape  # noqa: E402

SPACE = KvSpace(rows=3, limit=32, blocks=8, block=8)
TARGETS = (
    Shape("prefill", 2, 16, 32, LIKELIEST),
    Shape("prefill", 1, 16, 32, LOGITS),
    Shape("decode", 2, 1, 32, LIKELIEST),
    Shape("decode", 2, 1, 32, LOGITS),
    Shape("verify", 2, 3, 32, SCORES),
)
FLOAT = torch.float32
STAGES = (  # of async mode, and of the two stages of a pipeline
    (Shape("decode", 2, 1, 32, LIKELIEST), Border(feedback=True)),
    (Shape("decode", 2, 1, 32, LOGITS), Border(feedback=True)),
    (Shape("prefill", 1, 16, 32, SCORES), Border(feedback=True)),
    (graphs.Move("kv_export", 4), Border(feedback=True)),
    (Shape("prefill", 2, 16, 32, HIDDEN), Border(last=False, hidden=64)),
    (Shape("decode", 2, 1, 32, LIKELIEST), Border(first=False, hidden=64)),
)
MOVES = (graphs.Move("kv_export", 4), graphs.Move("kv_import", 4), graphs.Move("kv_copy", 4))  # the same for every family
SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 32, "head_dim": 16,
         "num_key_value_heads": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu"}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 1e4, **SMALL},
    "mixtral": {"model_type": "mixtral", "rope_theta": 1e4, **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": None},
    "gpt_neox": {"model_type": "gpt_neox", **{k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")},
                 "num_attention_heads": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "use_parallel_residual": True},
}  # fmt: skip


class Random(Mapping[str, Tensor]):
    """A checkpoint of random tensors with the names and shapes a family wants."""

    def __init__(self, arch: Any, family: Any) -> None:
        from rayneuron.models.stored import checkpoint_shapes

        generator = torch.Generator().manual_seed(0)
        self._tensors = {n: torch.randn(s, generator=generator) * 0.1 for n, s in checkpoint_shapes(arch, family)}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Groups:
    """Collectives of one group of all ranks, as they go into the graph; the rank is data."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._groups = ranks, [list(range(ranks))]

    def reduce(self, x: Tensor) -> Tensor:
        # Not xm.all_reduce: it leaves the collective out where this process is the only one.
        return torch_xla._XLAC._xla_all_reduce("sum", x, 1.0, self._groups, False)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch_xla._XLAC._xla_all_gather(x, dim % x.dim(), self.ranks, self._groups, False, None, None)

    def reduce_scatter(self, x: Tensor, dim: int, computation: str = "sum") -> Tensor:
        return xm.reduce_scatter(computation, x, 1.0, dim % x.dim(), self.ranks, self._groups, pin_layout=False)

    def share(self, x: Tensor, dim: int) -> Tensor:
        return self.reduce_scatter(x, dim, "max")

    send = receive = broadcast = None  # no verbs of a graph


def graph_of(name: str, ranks: int, comm: Any, border: Border = WHOLE, sequence_parallel: bool = False) -> graphs.Graph:
    config = FAMILIES[name]
    arch, family = models.architecture(config), models.family(config)
    stages = 1 if border.first and border.last else 2
    loaded = weights.load(
        arch, family, Random(arch, family), dtype=FLOAT, rank=0, ranks=ranks, stage=int(not border.first), stages=stages
    )  # fmt: skip
    kv = kv_shape(arch, SPACE, ranks, len(loaded["layers"]))
    program = pipeline.program(arch, Stage(FLOAT, border.first, border.last, sequence_parallel))
    return graphs.Graph(program, ops.PLAIN, comm, loaded, kv, FLOAT, border)


def inputs(graph: graphs.Graph, target: graphs.Target, border: Border = WHOLE) -> dict[str, Tensor]:
    made = graphs.example(target, graph.kv, FLOAT, border)
    if isinstance(target, Shape):
        if border.first:
            made["tokens"] += torch.arange(1, target.tokens + 1, dtype=torch.int32)
        else:
            made["hidden"] += torch.linspace(-1, 1, border.hidden)
        if border.feedback and target.tokens == 1:
            made["tokens"][1:] = FOLLOWS
        made["positions"] += torch.arange(target.tokens, dtype=torch.int32)
        made["blocks"] += torch.arange(made["blocks"].numel(), dtype=torch.int32).view(made["blocks"].shape)
        made["slots"] += made["blocks"][:, :1] * SPACE.block + torch.arange(target.tokens, dtype=torch.int32) % SPACE.block
        if "rows" in made:
            made["rows"] += torch.arange(target.rows, dtype=torch.int32)
        for name, value in (("temperature", 0.8), ("top_p", 0.9), ("uniform", 0.4)):
            if name in made:
                made[name] += value
    else:
        for name, first in (("moved", 1), ("source", 1), ("target", 4)):
            if name in made:
                made[name] += torch.arange(first, first + target.blocks, dtype=torch.int32)
        if "values" in made:
            made["values"] += 1.5
    return made


def check_one(name: str, target: graphs.Target, border: Border = WHOLE) -> str:
    """Lower and run one graph on XLA's CPU; returns what was seen, raises AssertionError where it is wrong."""
    eager, lowered = graph_of(name, 1, Solo(), border), graph_of(name, 1, Solo(), border)
    eager.shown = lowered.shown = target
    given = inputs(eager, target, border)
    if border.feedback:
        for graph in (eager, lowered):
            graph.ids += torch.arange(7, 7 + SPACE.rows + 1, dtype=torch.int32)
    with torch.no_grad():
        want = eager(**given)
        device = torch_xla.device()
        lowered.to(device)
        moved = {k: t.to(device) for k, t in given.items()}
        torch_xla.sync()
        metrics.clear_all()
        before = set(Path(DUMP).glob("*before_optimizations.txt"))
        got = lowered(**moved)
        torch_xla.sync()
    fallbacks = [c for c in metrics.counter_names() if c.startswith("aten::")]
    assert not fallbacks, f"operators fell back to eager: {fallbacks}"
    text = max(set(Path(DUMP).glob("*before_optimizations.txt")) - before, key=lambda f: f.stat().st_size).read_text()
    assert "<=" not in text.split("ENTRY")[1], "a dynamic dimension"
    entry = text.split("ENTRY")[1]
    states = len(list(lowered.buffers()))
    worst = max(float((a.cpu().float() - b.float()).abs().max()) for a, b in zip(got, want, strict=True))
    worst_kv = max(float((a.cpu() - b).abs().max()) for a, b in zip(lowered.buffers(), eager.buffers(), strict=True))
    assert worst < 1e-4 and worst_kv < 1e-5, f"outputs differ by {worst}, KV by {worst_kv}"
    return f"{states} states rebound, {len(entry.splitlines())} instructions, differs by {worst:.1e}, KV by {worst_kv:.1e}"


def check_groups(name: str, ranks: int, sequence_parallel: bool = False) -> str:
    """Rank 0's graph of a group of `ranks`, lowered only: one replica group of all ranks in every collective."""
    graph = graph_of(name, ranks, Groups(ranks), sequence_parallel=sequence_parallel)
    target = Shape("prefill", 1, 32, 32, LIKELIEST) if sequence_parallel else Shape("decode", 2, 1, 32, LIKELIEST)
    graph.shown = target
    device = torch_xla.device()
    graph.to(device)
    torch_xla._XLAC._set_all_reduce_token(str(device), None)  # else the collectives of an earlier graph are chained in front
    with torch.no_grad():
        out = graph(**{k: t.to(device) for k, t in inputs(graph, target).items()})
    context = torch_xla._XLAC.lowering.LoweringContext()
    context.build([*out, *graph.buffers()])
    chunks = context.hlo_text().split("instructions {")  # the module as protobuf text
    kinds = {kind: sum(f'opcode: "{kind}"' in c for c in chunks) for kind in ("all-reduce", "reduce-scatter", "all-gather")}
    found = [c for c in chunks if re.search(r'opcode: "(all-|reduce-scatter)', c)]
    groups = [[list(map(int, re.findall(r"replica_ids: (\d+)", g))) for g in c.split("replica_groups {")[1:]] for c in found]
    layers = 2
    if sequence_parallel:  # the embedding; its shares, attention and feed-forward; before both, the last norm and the logits
        wanted = {"all-reduce": 1, "reduce-scatter": 1 + 2 * layers, "all-gather": 2 * layers + 2}
    else:  # embedding, attention and feed-forward; the logits
        wanted = {"all-reduce": 1 + 2 * layers, "reduce-scatter": 0, "all-gather": 1}
    assert kinds == wanted, kinds
    assert len(groups) == sum(kinds.values()) and all(g == [list(range(ranks))] for g in groups), groups
    return f"{' + '.join(f'{n} {kind}' for kind, n in kinds.items() if n)}, all over 0..{ranks - 1}"


def said(border: Border) -> str:
    return "async" if border.feedback else "stage 0" if border.first else "stage 1"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--nxd", type=Path, help="src folder of a neuronx-distributed checkout")
    args = parser.parse_args()
    passed = failed = 0
    checks = [(f"{f} {graphs.name(t)}", partial(check_one, f, t)) for f in args.family or FAMILIES for t in TARGETS]
    checks += [(f"llama {graphs.name(t)}", partial(check_one, "llama", t)) for t in MOVES]
    checks += [(f"llama {graphs.name(t)} {said(b)}", partial(check_one, "llama", t, b)) for t, b in STAGES]
    checks += [(f"llama decode, {r} ranks", partial(check_groups, "llama", r)) for r in (8, 32)]
    checks += [(f"llama sequence parallel, {r} ranks", partial(check_groups, "llama", r, True)) for r in (8, 32)]
    if args.nxd:
        import sharding

        checks.append(("shard_checkpoint of NxD", partial(sharding.check, args.nxd)))
    for name, check in checks:
        started = time.perf_counter()
        try:
            print(f"ok    {name:<44} {check()} ({time.perf_counter() - started:.1f} s)", flush=True)
            passed += 1
        except AssertionError as problem:
            print(f"WRONG {name:<44} {problem}", flush=True)
            failed += 1
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
