"""The graph gate: what is compiled for Neuron exports for every family and every tag. Static shapes, no host read, int32 at the borders,
exactly the KV buffers written, and the outputs of the CPU device's program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayneuron import models
from rayneuron.devices.base import FOLLOWS, HIDDEN, LIKELIEST, LOGITS, SAMPLED, SCORES, Shape
from rayneuron.devices.neuron import graphs as graphs
from rayneuron.devices.neuron.graphs import WHOLE, Border
from rayneuron.group import pipeline
from rayneuron.models import hub, ops, weights
from rayneuron.models.collectives import Solo
from rayneuron.models.kv import KvShape, KvSpace
from rayneuron.models.memory import kv_shape
from tests.models import cases, runs

FAMILIES = ("llama", "llama_tied", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_bigcode", "opt_350m", "bloom",
            "gpt_neox", "gptj", "dbrx",
            *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "gemma3_text", "olmo2", "qwen2_moe")))  # fmt: skip
SPACE = KvSpace(rows=3, limit=32, blocks=12, block=8)
WHOLE_ROWS = KvSpace(rows=3, limit=32, blocks=3, block=32)
TARGETS = (Shape("prefill", 2, 16, 32, LIKELIEST), Shape("decode", 2, 1, 32, LOGITS), Shape("verify", 2, 3, 32, SCORES))
ONCE = (  # what no family changes
    Shape("prefill", 1, 16, 32, LOGITS),
    Shape("prefill", 1, 16, 32, SCORES),
    Shape("decode", 2, 1, 16, LIKELIEST),
    graphs.Move("kv_export", 4),
    graphs.Move("kv_import", 4),
    graphs.Move("kv_copy", 4),
)
HOST = ("aten.item", "_local_scalar", "nonzero", "unique", "masked_select", "sym_size", "_assert_async", "multinomial")


@pytest.fixture(scope="module", params=FAMILIES)
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> graphs.Graph:
    """One rank of a tiny model of each family."""
    return opened(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> graphs.Graph:
    return opened("llama", tmp_path_factory.mktemp("llama"))


def opened(family: str, folder: Path, border: Border = WHOLE, space: KvSpace = SPACE) -> graphs.Graph:
    cases.save(cases.CONFIGS[family](), folder, tokens=2)
    raw = hub.read_config(folder)
    arch = models.architecture(raw)
    stages = 1 if border.first and border.last else 2
    loaded = weights.load(
        arch, models.family(raw), hub.Checkpoint(folder), dtype=torch.float32, stage=int(not border.first), stages=stages
    )  # fmt: skip
    shape = kv_shape(arch, space, layers=len(loaded["layers"]))
    border = replace(border, hidden=arch.hidden)
    program = pipeline.program(arch, pipeline.Stage(torch.float32, border.first, border.last))
    return graphs.Graph(program, ops.PLAIN, Solo(), loaded, shape, torch.float32, border)


def inputs(graph: graphs.Graph, target: graphs.Target) -> dict[str, torch.Tensor]:
    """Inputs that differ in every row, the last one idle; the rest zero as in the example."""
    border = graph._border
    made = graphs.example(target, graph.kv, torch.float32, border)
    generator = torch.Generator().manual_seed(5)
    if isinstance(target, graphs.Move):
        scratch = graph.kv.space.scratch
        for name in made.keys() & {"moved", "source", "target"}:
            made[name][:] = torch.tensor([1, 0, 2, scratch] if name != "target" else [2, 1, 0, scratch])
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
    rows = torch.tensor([2, 3] if target.rows == 2 else [2], dtype=torch.int32)
    where = runs.places(graph.kv.space, runs.table(graph.kv.space), made["positions"], rows, target.length)
    made["blocks"][:], made["slots"][:] = where.blocks, where.slots
    if "rows" in made:
        made["rows"][:] = rows
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


STAGES = ((Shape("decode", 2, 1, 32, HIDDEN), Border(last=False)), (Shape("decode", 2, 1, 32, LIKELIEST), Border(first=False)))


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
    graph.shown = target = Shape("decode", 2, 1, 32, LIKELIEST)
    given = graphs.example(target, graph.kv, torch.float32, graph._border)
    rows = torch.tensor([2, 0], dtype=torch.int32)
    given["tokens"][:, 0], given["rows"][:] = torch.tensor([5, 9]), rows

    def at(position: int) -> dict[str, torch.Tensor]:
        positions = torch.full((2, 1), position, dtype=torch.int32)
        where = runs.places(SPACE, runs.table(SPACE), positions, rows, 32)
        return {**given, "positions": positions, "blocks": where.blocks, "slots": where.slots}

    with torch.no_grad():
        (first,) = graph(**at(0))
        assert graph.ids.tolist() == [int(first[1]), 0, int(first[0]), 0]
        before = {name: value.clone() for name, value in graph.named_buffers()}
        (told,) = graph(**{**at(1), "tokens": first})
        for name, value in before.items():
            setattr(graph, name, value)
        (followed,) = graph(**{**at(1), "tokens": torch.full((2, 1), FOLLOWS, dtype=torch.int32)})
    assert torch.equal(told, followed) and first.flatten().tolist() != [5, 9]


def check(graph: graphs.Graph, target: graphs.Target) -> None:
    graph.shown = target
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
    states = {*graphs.states(graph.kv)} | ({"ids"} if graph._border.feedback else set())
    assert set(signature.buffers_to_mutate.values()) == states
    assert not signature.user_inputs_to_mutate and not getattr(signature, "parameters_to_mutate", {})
    assert all(t.dtype in (torch.int32, torch.float32) for t in given.values())
    returned = [n for n in program.graph.output_node().args[0] if n.name in signature.user_outputs]
    assert returned and all(n.meta["val"].dtype in (torch.int32, torch.float32) for n in returned)
    check_values(graph, program, given)


def check_values(graph: graphs.Graph, program: torch.export.ExportedProgram, given: dict[str, torch.Tensor]) -> None:
    """The exported graph and the module compute and write the same; every state is another tensor afterwards: none is written in place."""
    generator = torch.Generator().manual_seed(6)
    names = graphs.states(graph.kv) + ["ids"] * graph._border.feedback
    start = {n: torch.randn(graph.get_buffer(n).shape, generator=generator) for n in graphs.states(graph.kv)}
    if graph._border.feedback:
        start["ids"] = torch.arange(7, 7 + len(graph.ids), dtype=torch.int32)
    for name, value in start.items():
        setattr(graph, name, value.clone())
    held = {n: graph.get_buffer(n) for n in names}
    exported = program.module()
    for name in names:
        exported.get_buffer(name).copy_(start[name])
    with torch.no_grad():
        want, got = graph(**given), exported(**given)
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))
    for name in names:
        assert graph.get_buffer(name) is not held[name] and torch.equal(held[name], start[name])
        assert torch.equal(graph.get_buffer(name), exported.get_buffer(name)) and not torch.equal(graph.get_buffer(name), start[name])


def test_what_is_exported_is_what_is_imported_and_copied(llama: graphs.Graph) -> None:
    """Blocks go out by one graph, come back into others by the next, and are copied by the third."""
    graph, generator = llama, torch.Generator().manual_seed(8)
    for name in graphs.states(graph.kv):
        setattr(graph, name, torch.randn(graph.get_buffer(name).shape, generator=generator))
    before = torch.stack([graph.get_buffer(n) for n in graphs.states(graph.kv)])  # 2 layers, N H S D

    def ids(*blocks: int) -> torch.Tensor:
        return torch.tensor([*blocks, *[SPACE.scratch] * (4 - len(blocks))], dtype=torch.int32)

    with torch.no_grad():
        graph.shown = graphs.Move("kv_export", 4)
        (values,) = graph(moved=ids(0, 5))
        graph.shown = graphs.Move("kv_import", 4)
        graph(moved=ids(7, 1), values=values)
        graph.shown = graphs.Move("kv_copy", 4)
        graph(source=ids(7, 2), target=ids(3, 6))
    after = torch.stack([graph.get_buffer(n) for n in graphs.states(graph.kv)])
    parts = values[:, :2].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)  # keys and values of a layer, as the states are
    assert torch.equal(parts, before[:, [0, 5]])
    assert torch.equal(after[:, :9], before[:, [0, 5, 2, 0, 4, 5, 2, 0, 8]])


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("target", [*TARGETS, ONCE[3]], ids=graphs.name)
def test_one_block_a_row_exports(tmp_path: Path, target: graphs.Target) -> None:
    check(opened("llama", tmp_path, space=WHOLE_ROWS), target)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_the_gate_sees_what_it_must_refuse(tiny: Path) -> None:
    """Neither a program that reads on the host passes nor one that leaves a state as it was."""

    def host_read(ops, comm, w, kv, batch, shape):
        if batch.tokens.sum().item() > 0:
            kv.layers[0] = tuple(store + 1 for store in kv.layers[0])
        return None

    def unwritten(ops, comm, w, kv, batch, shape):
        from rayneuron.devices.base import StepOutput

        kv.layers[0] = tuple(store + 1 for store in kv.layers[0])
        return StepOutput(ids=batch.tokens + 0)

    kv = KvShape(SPACE, layers=2, heads=1, dim=4)
    shape = Shape("decode", 2, 1, 8, LIKELIEST)
    for program in (host_read, unwritten):
        made = graphs.Graph(program, ops.PLAIN, Solo(), {"top": {}, "layers": []}, kv, torch.float32)
        made.shown = shape
        given = graphs.example(shape, kv, torch.float32)
        with pytest.raises(Exception, match="[Dd]ata-dependent|unbacked|u0" if program is host_read else "leaves kv_1_k as it was"):
            torch.export.export(made, (), given, strict=False)


def test_names_and_service() -> None:
    shapes = [Shape("decode", 4, 1, 128, want) for want in (LIKELIEST, SAMPLED, LOGITS)]
    assert [graphs.name(t) for t in graphs.targets(shapes, 16)] == [
        "decode_b4_t1_l128_likeliest_last", "decode_b4_t1_l128_sampled_logits_last", "kv_export_n16", "kv_import_n16", "kv_copy_n16",
    ]  # fmt: skip
    assert graphs.input_names(Shape("prefill", 1, 16, 32, LIKELIEST)) == ("tokens", "positions", "blocks", "slots", "last")
    read = graphs.input_names(Shape("decode", 1, 1, 32, LIKELIEST), Border(feedback=True))
    assert read == ("tokens", "positions", "rows", "blocks", "slots")
