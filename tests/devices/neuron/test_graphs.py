"""The graph gate: what is compiled for Neuron exports for every family and every tag. Static shapes, no host read, int32 at the borders,
exactly the KV buffers written, and the outputs of the CPU device's program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayneuron import models
from rayneuron.devices.base import FOLLOWS, Shape
from rayneuron.devices.neuron import graphs as graphs
from rayneuron.devices.neuron.graphs import WHOLE, Border
from rayneuron.group import pipeline
from rayneuron.models import decoder, hub, ops, weights
from rayneuron.models.collectives import Solo
from tests.models import cases

FAMILIES = ("llama", "llama_tied", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_bigcode", "opt_350m", "bloom",
            "gpt_neox", "gptj", "dbrx")  # fmt: skip
ROWS, LENGTH = 3, 32  # scratch row 3, scratch column 32
TARGETS = (Shape("prefill", 2, 16, 32, "greedy"), Shape("decode", 2, 1, 32, "logits"), Shape("verify", 2, 3, 32, "scores"))
ONCE = (  # what no family changes
    Shape("prefill", 1, 16, 32, "logits"),
    Shape("prefill", 1, 16, 32, "scores"),
    Shape("decode", 2, 1, 16, "greedy"),
    graphs.Move("kv_export", 8),
    graphs.Move("kv_import", 8),
)
HOST = ("aten.item", "_local_scalar", "nonzero", "unique", "masked_select", "sym_size", "_assert_async", "multinomial")


@pytest.fixture(scope="module", params=FAMILIES)
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> graphs.Graph:
    """One rank of a tiny model of each family."""
    return opened(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> graphs.Graph:
    return opened("llama", tmp_path_factory.mktemp("llama"))


def opened(family: str, folder: Path, border: Border = WHOLE) -> graphs.Graph:
    cases.save(cases.CONFIGS[family](), folder, tokens=2)
    raw = hub.read_config(folder)
    arch = models.architecture(raw)
    stages = 1 if border.first and border.last else 2
    loaded = weights.load(
        arch, models.family(raw), hub.Checkpoint(folder), dtype=torch.float32, stage=int(not border.first), stages=stages
    )  # fmt: skip
    shapes = decoder.kv_shapes(arch, ROWS + 1, LENGTH + 1, layers=len(loaded["layers"]))
    border = replace(border, hidden=arch.hidden)
    program = pipeline.program(arch, pipeline.Stage(torch.float32, border.first, border.last))
    return graphs.Graph(program, ops.PLAIN, Solo(), loaded, shapes, torch.float32, border)


def inputs(graph: graphs.Graph, target: graphs.Target) -> dict[str, torch.Tensor]:
    """Inputs that differ in every row, the last one idle; the rest zero as in the example."""
    border = graph._border
    made = graphs.example(target, graph.kv.get_buffer("0").shape, len(list(graph.kv.buffers())), torch.float32, border)
    generator = torch.Generator().manual_seed(5)
    if isinstance(target, graphs.Move):
        made["row"][:] = 1
        made["columns"][:] = torch.arange(3, 3 + target.positions)
        if "values" in made:
            made["values"].normal_(generator=generator)
        return made
    if border.first:
        made["tokens"].random_(0, cases.VOCAB, generator=generator)
    else:
        made["hidden"].normal_(generator=generator)
    if border.feedback and target.tokens == 1:
        made["tokens"][0] = FOLLOWS
    made["positions"][:] = torch.arange(4, 4 + target.tokens)
    made["rows"][:] = torch.tensor([2, ROWS] if target.rows == 2 else [2])
    if "last" in made:
        made["last"][:] = 9
    if "temperature" in made:
        made["temperature"][:] = 0.7
        made["top_k"][:] = 5
        made["top_p"][:] = 0.9
        made["uniform"][:] = 0.4
    return made


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, from inside run_decompositions
@pytest.mark.parametrize("target", TARGETS, ids=graphs.name)
def test_every_family_exports(graph: graphs.Graph, target: graphs.Target) -> None:
    check(graph, target)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("target", ONCE, ids=graphs.name)
def test_every_kind_of_graph_exports(llama: graphs.Graph, target: graphs.Target) -> None:
    check(llama, target)


STAGES = ((Shape("decode", 2, 1, 32, "hidden"), Border(last=False)), (Shape("decode", 2, 1, 32, "greedy"), Border(first=False)))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_both_stages_of_every_family_export(family: str, tmp_path: Path) -> None:
    """Hidden states out of the first stage and into the last, which sees no token."""
    for target, border in STAGES:
        check(opened(family, tmp_path, border), target)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[1], ONCE[1], *ONCE[3:]], ids=graphs.name)
def test_the_ids_sampled_last_are_a_state_of_every_graph(tmp_path: Path, target: graphs.Target) -> None:
    """Of async mode: every graph writes them, those that sample nothing too."""
    check(opened("llama", tmp_path, Border(feedback=True)), target)


def test_an_id_follows_from_step_to_step(tmp_path: Path) -> None:
    """Two decode steps; the second is told nothing but FOLLOWS, and equals one that is told the id."""
    graph = opened("llama", tmp_path, Border(feedback=True))
    graph.target = target = Shape("decode", 2, 1, 32, "greedy")
    given = graphs.example(target, graph.kv.get_buffer("0").shape, 2, torch.float32)
    given["tokens"][:, 0] = torch.tensor([5, 9])
    given["rows"][:] = torch.tensor([2, 0])
    with torch.no_grad():
        (first,) = graph(**given)
        assert graph.ids.tolist() == [int(first[1]), 0, int(first[0]), 0]
        kv = [b.clone() for b in graph.kv.buffers()]
        given["positions"][:] = 1
        (told,) = graph(**{**given, "tokens": first[:, None]})
        for buffer, value in zip(graph.kv.buffers(), kv, strict=True):
            buffer.copy_(value)
        graph.ids[torch.tensor([2, 0])] = first
        (followed,) = graph(**{**given, "tokens": torch.full((2, 1), FOLLOWS, dtype=torch.int32)})
    assert torch.equal(told, followed) and first.tolist() != [5, 9]


def check(graph: graphs.Graph, target: graphs.Target) -> None:
    graph.target = target
    given = inputs(graph, target)
    exported = torch.export.export(graph, (), given, strict=False)
    assert not exported.range_constraints  # no symbolic, hence no data-dependent, shape
    program = exported.run_decompositions({})
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    assert not [str(n.target) for n in calls if any(word in str(n.target) for word in HOST)]
    for node in program.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or all(type(n) is int for n in value.shape), node
    signature = program.graph_signature
    states = {f"kv.{i}" for i in range(len(list(graph.kv.buffers())))} | ({"ids"} if graph._border.feedback else set())
    assert set(signature.buffers_to_mutate.values()) == states
    assert not signature.user_inputs_to_mutate and not getattr(signature, "parameters_to_mutate", {})
    assert all(t.dtype in (torch.int32, torch.float32) for t in given.values())
    returned = [n for n in program.graph.output_node().args[0] if n.name in signature.user_outputs]
    assert returned and all(n.meta["val"].dtype in (torch.int32, torch.float32) for n in returned)
    check_values(graph, program, given)


def check_values(graph: graphs.Graph, program: torch.export.ExportedProgram, given: dict[str, torch.Tensor]) -> None:
    """The exported graph and the module compute and write the same."""
    generator = torch.Generator().manual_seed(6)
    start = [torch.randn(b.shape, generator=generator) for b in graph.kv.buffers()]
    results = []
    for run in (graph, program.module()):
        held = dict(run.named_buffers())
        for i, value in enumerate(start):
            held[f"kv.{i}"].copy_(value)
        if "ids" in held:
            held["ids"].copy_(torch.arange(7, 7 + len(held["ids"])))
        with torch.no_grad():
            out = run(**given)
        names = [f"kv.{i}" for i in range(len(start))] + ["ids"] * ("ids" in held)
        results.append((out, [held[name].clone() for name in names]))
    (a, kv_a), (b, kv_b) = results
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(kv_a, kv_b, strict=True))
    assert all(not torch.equal(x, y) for x, y in zip(kv_a[: len(start)], start, strict=True))


def test_what_is_exported_is_what_is_imported(llama: graphs.Graph) -> None:
    """A KV row goes out by one graph and comes back into another row by the other."""
    graph = llama
    generator = torch.Generator().manual_seed(8)
    for buffer in graph.kv.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    columns = torch.tensor([0, 1, 2, 3, 4, LENGTH, LENGTH, LENGTH], dtype=torch.int32)  # five positions, three of padding
    graph.target = graphs.Move("kv_export", 8)
    with torch.no_grad():
        (values,) = graph(row=torch.tensor([0], dtype=torch.int32), columns=columns)
        before = [b.clone() for b in graph.kv.buffers()]
        graph.target = graphs.Move("kv_import", 8)
        graph(row=torch.tensor([2], dtype=torch.int32), columns=columns, values=values)
    for old, new, moved in zip(before, graph.kv.buffers(), values, strict=True):
        assert torch.equal(new[:, 2, :, :5], old[:, 0, :, :5]) and torch.equal(moved[:, :, :5], old[:, 0, :, :5])
        assert torch.equal(new[:, 2, :, 5:LENGTH], old[:, 2, :, 5:LENGTH]) and torch.equal(new[:, :2], old[:, :2])


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_the_gate_sees_what_it_must_refuse(tiny: Path) -> None:
    """A program that reads on the host does not pass; one that leaves a state alone still writes it back, as the state set rule asks."""

    def host_read(ops, comm, w, kv, batch, shape):
        if batch.tokens.sum().item() > 0:
            kv[0].add_(1)
        return None

    def unwritten(ops, comm, w, kv, batch, shape):
        from rayneuron.devices.base import StepOutput

        kv[0][:, 0, :, 0] = 1.0
        return StepOutput(ids=batch.tokens[:, 0] + 0)

    shapes = [(2, 4, 1, 8, 4)] * 2
    shape = Shape("decode", 2, 1, 8, "greedy")
    for program in (host_read, unwritten):
        made = graphs.Graph(program, ops.PLAIN, Solo(), {"top": {}, "layers": []}, shapes, torch.float32)
        made.target = shape
        given = graphs.example(shape, shapes[0], 2, torch.float32)
        if program is host_read:
            with pytest.raises(Exception, match="[Dd]ata-dependent|unbacked|u0"):
                torch.export.export(made, (), given, strict=False)
        else:
            signature = torch.export.export(made, (), given, strict=False).run_decompositions({}).graph_signature
            assert set(signature.buffers_to_mutate.values()) == {"kv.0", "kv.1"}


def test_names_and_service() -> None:
    shapes = [Shape("decode", 4, 1, 128, o) for o in ("greedy", "sample", "logits")]
    assert [graphs.name(t) for t in graphs.targets(shapes, 128)] == [
        "decode_b4_t1_l128_greedy", "decode_b4_t1_l128_logits", "kv_export_n128", "kv_import_n128",
    ]  # fmt: skip
    assert graphs.input_names(Shape("prefill", 1, 16, 32, "greedy")) == ("tokens", "positions", "rows", "last")
    assert graphs.input_names(Shape("decode", 1, 1, 32, "greedy")) == ("tokens", "positions", "rows")
