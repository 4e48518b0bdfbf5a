"""The graph gate: what is compiled for Neuron exports for every family and every tag. Static shapes, no host read, int32 at the borders,
exactly the KV buffers written, and the outputs of the CPU device's program."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from rayneuron import models
from rayneuron.devices import neuron_graphs as graphs
from rayneuron.devices.base import Shape, Solo
from rayneuron.engine.step import step
from rayneuron.models import decoder, hub, ops, weights
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


def opened(family: str, folder: Path) -> graphs.Graph:
    cases.save(cases.CONFIGS[family](), folder, tokens=2)
    raw = hub.read_config(folder)
    arch = models.architecture(raw)
    loaded = weights.load(arch, models.family(raw), hub.Checkpoint(folder), dtype=torch.float32)
    shapes = decoder.kv_shapes(arch, ROWS + 1, LENGTH + 1)
    return graphs.Graph(partial(step, arch), ops.PLAIN, Solo(), loaded, shapes, torch.float32)


def inputs(graph: graphs.Graph, target: graphs.Target) -> dict[str, torch.Tensor]:
    """Inputs that differ in every row, the last one idle; the rest zero as in the example."""
    made = graphs.example(target, graph.kv.get_buffer("0").shape, len(list(graph.kv.buffers())), torch.float32)
    generator = torch.Generator().manual_seed(5)
    if isinstance(target, graphs.Move):
        made["row"][:] = 1
        made["columns"][:] = torch.arange(3, 3 + target.positions)
        if "values" in made:
            made["values"].normal_(generator=generator)
        return made
    made["tokens"].random_(0, cases.VOCAB, generator=generator)
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
    assert set(signature.buffers_to_mutate.values()) == {f"kv.{i}" for i in range(len(list(graph.kv.buffers())))}
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
        with torch.no_grad():
            out = run(**given)
        results.append((out, [held[f"kv.{i}"].clone() for i in range(len(start))]))
    (a, kv_a), (b, kv_b) = results
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(kv_a, kv_b, strict=True))
    assert all(not torch.equal(x, y) for x, y in zip(kv_a, start, strict=True))


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
