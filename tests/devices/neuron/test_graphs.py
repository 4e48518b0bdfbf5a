"""The graph gate: what is compiled for Neuron exports for every family and every tag. Static shapes, no host read, int32 at the borders,
exactly the KV buffers written, and the outputs of the CPU device's program."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayneuron import models
from rayneuron.config import parse
from rayneuron.devices.base import FOLLOWS, HIDDEN, LIKELIEST, LOGITS, SAMPLED, SCHEMA, SCORES, Batch, Shape
from rayneuron.devices.idle import idle
from rayneuron.devices.neuron import graphs, targets
from rayneuron.devices.neuron.targets import WHOLE, Border, Move
from rayneuron.engine.buckets import EVERY
from rayneuron.group import pipeline
from rayneuron.models import hub, ops, weights
from rayneuron.models.collectives import Solo
from rayneuron.models.kv import Kv, KvShape, KvSpace
from rayneuron.models.memory import kv_shape
from rayneuron.placement.fitting import capacity_of
from rayneuron.placement.memory import memory
from tests.models import adapters, cases, runs

FIRST = ("llama", "llama_tied", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_bigcode", "opt_350m", "bloom", "gpt_neox",
         "gptj", "dbrx")  # fmt: skip
LATER = ("gemma2", "gemma3_text", "olmo2", "qwen2_moe", "gpt_oss", "phi3", "phi3_long", "granite", "starcoder2", "stablelm",
         "stablelm_parallel", "falcon", "falcon_new", "falcon_serial", "gemma", "smollm3", "phi", "glm4", "cohere2", "exaone4", "nemotron",
         "arcee", "olmo", "olmo3", "olmoe", "granitemoe", "glm4_moe", "ernie4_5_moe")  # fmt: skip
ENDS = ("llama", "llama_tied", "mixtral", "gpt2", "opt_350m", "bloom", "gptj")  # each embeds, or ends, in its own way
ADAPTED = ("llama", "gpt2", "gpt_bigcode", "mixtral")  # rows of q, k and v apart and in one, two ways; experts, which have none
SPACE = KvSpace(rows=3, limit=32, blocks=12, block=8)
WHOLE_ROWS = KvSpace(rows=3, limit=32, blocks=3, block=32)
TARGETS = (Shape("prefill", 2, 16, 32, LIKELIEST), Shape("decode", 2, 1, 32, LOGITS), Shape("verify", 2, 3, 32, EVERY[LOGITS]))
ONCE = (  # what no family changes
    Shape("prefill", 1, 16, 32, LOGITS),
    Shape("prefill", 1, 16, 32, SCORES),
    Shape("decode", 2, 1, 16, LIKELIEST),
    Move("kv_export", 4),
    Move("kv_import", 4),
    Move("kv_copy", 4),
)
HOST = ("aten.item", "_local_scalar", "nonzero", "unique", "masked_select", "sym_size", "_assert_async", "multinomial")


def test_the_hlo_gate_knows_every_family() -> None:
    """examples/hlo_check lowers them in an environment without transformers, from what was written down of the test models."""
    file = Path(__file__).parents[3] / "examples" / "hlo_check" / "families.json"
    held = {name: models.architecture(raw) for name, raw in json.loads(file.read_text()).items()}
    assert held == {name: models.architecture(make().to_dict()) for name, make in cases.CONFIGS.items()}
    assert {one.model_type for one in held.values()} == set(models.FAMILIES)


@pytest.fixture(autouse=True)
def compiler(standin_modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler is known to refuse, as the stand-in has it, is looked for in every graph here."""
    refused, seen = (standin_modules[f"neuronx_distributed.trace.{n}"] for n in ("compiler", "executable"))
    monkeypatch.setitem(globals(), "problems", lambda node: [*refused.refused(seen._seen(node))])


def problems(node: torch.fx.Node) -> list[str]:
    raise AssertionError("the fixture puts another in its place")


def families(quick: tuple[str, ...]) -> list[Any]:
    """All of them; the others than these in slow runs."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in (*FIRST, *LATER)]


@pytest.fixture(scope="module", params=families(FIRST))
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
    if border.adapters:
        adapters.reside(folder, loaded)
    border = replace(border, hidden=arch.hidden)
    program = pipeline.program(arch, pipeline.Stage(torch.float32, border.first, border.last))
    return graphs.Graph(program, Solo(), loaded, shape, torch.float32, border)


def inputs(graph: graphs.Graph, target: targets.Target) -> dict[str, torch.Tensor]:
    """Inputs that differ in every row, the last one idle where rows may be mixed; the rest as in the example."""
    if isinstance(target, Shape):
        return graphs.pack(filled(graph, target), target, graph._border)
    made, generator = graphs.example(target, graph.kv, torch.float32, graph._border), torch.Generator().manual_seed(5)
    scratch = graph.kv.space.scratch
    for name in made.keys() & {"moved", "source", "target"}:
        ids = [1, 0, 2, scratch] if name != "target" else [2, 1, 0, scratch]
        made[name][:] = torch.tensor(ids[: len(made[name])])
    if "values" in made:
        made["values"].normal_(generator=generator)
    return made


def filled(graph: graphs.Graph, target: Shape) -> Batch:
    """A batch for `target`."""
    border, generator = graph._border, torch.Generator().manual_seed(5)
    made = idle(target, graph.kv.space)
    made.tokens.random_(0, cases.VOCAB, generator=generator)
    if not border.first:
        made.hidden = torch.randn(target.rows, target.tokens, border.hidden, generator=generator)
    if border.feedback and target.tokens == 1:
        made.tokens[0] = FOLLOWS
    if border.adapters:
        made.adapters[0] = 1
    made.positions[:] = torch.arange(4, 4 + target.tokens)
    held = runs.table(graph.kv.space)
    rows = torch.tensor([2, 3] if target.rows == 2 else [2], dtype=torch.int32)
    if targets.aligned(target, graph.kv.space, border):
        rows = held[:, 0].argsort()[: target.rows].to(torch.int32)  # whoever holds the first blocks
    where = runs.places(graph.kv.space, held, made.positions, rows, target.length)
    made.blocks[:], made.slots[:], made.rows[:] = where.blocks, where.slots, rows
    made.last[:] = min(9, target.tokens - 1)
    made.temperature[:], made.top_k[:], made.top_p[:], made.uniform[:] = 0.7, 5, 0.9, 0.4
    return made


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, from inside run_decompositions
@pytest.mark.parametrize("target", [*TARGETS[:2], pytest.param(TARGETS[2], marks=pytest.mark.slow)], ids=targets.name)
def test_every_family_exports(graph: graphs.Graph, target: targets.Target) -> None:
    check(graph, target)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("target", [TARGETS[2], *ONCE], ids=targets.name)
def test_every_kind_of_graph_exports(llama: graphs.Graph, target: targets.Target) -> None:
    check(llama, target)


STAGES = ((Shape("decode", 2, 1, 32, HIDDEN), Border(last=False)), (Shape("decode", 2, 1, 32, LIKELIEST), Border(first=False)))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("family", families(ENDS))
def test_both_stages_of_every_family_export(family: str, tmp_path: Path) -> None:
    """Hidden states out of the first stage and into the last, which sees no token."""
    for target, border in STAGES:
        check(opened(family, tmp_path, border), target)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("family", [n if n in ADAPTED else pytest.param(n, marks=pytest.mark.slow) for n in cases.CONFIGS])
def test_every_family_exports_with_adapters(family: str, tmp_path: Path) -> None:
    """A row with the second of two, one without any: the slots are one more column of the integers, and the graph adds by them."""
    for target in TARGETS[:2]:
        graph = opened(family, tmp_path, Border(adapters=True))
        check(graph, target)
        given = inputs(graph, target)
        names = graphs.packed(target, graph._border)["ints"]
        assert given["ints"][:, names.index("adapters") - len(names)].tolist() == [1, -1]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_every_kind_of_graph_exports_with_adapters(tmp_path: Path) -> None:
    for target in (*ONCE[:3], TARGETS[2], *ONCE[3:]):
        check(opened("llama", tmp_path, Border(adapters=True)), target)
    for target, border in STAGES:
        check(opened("llama", tmp_path, replace(border, adapters=True)), target)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[1], ONCE[1], *ONCE[3:]], ids=targets.name)
def test_the_ids_sampled_last_are_a_state_of_every_graph(tmp_path: Path, target: targets.Target) -> None:
    """Of async mode: every graph writes them, those that sample nothing too."""
    check(opened("llama", tmp_path, Border(feedback=True)), target)


def test_an_id_follows_from_step_to_step(tmp_path: Path) -> None:
    """Two decode steps; the second is told nothing but FOLLOWS, and equals one that is told the id."""
    graph = opened("llama", tmp_path, Border(feedback=True))
    graph.shown = target = Shape("decode", 2, 1, 32, LIKELIEST)
    given = idle(target, graph.kv.space)
    rows = torch.tensor([2, 0], dtype=torch.int32)

    def at(position: int, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = torch.full((2, 1), position, dtype=torch.int32)
        where = runs.places(SPACE, runs.table(SPACE), positions, rows, 32)
        told = replace(given, tokens=tokens, rows=rows, positions=positions, blocks=where.blocks, slots=where.slots)
        return graphs.pack(told, target, graph._border)

    with torch.no_grad():
        (first,) = graph(**at(0, torch.tensor([[5], [9]], dtype=torch.int32)))
        assert graph.ids.tolist() == [int(first[1]), 0, int(first[0]), 0]
        before = {name: value.clone() for name, value in graph.named_buffers()}
        (told,) = graph(**at(1, first))
        for name, value in before.items():
            setattr(graph, name, value)
        (followed,) = graph(**at(1, torch.full((2, 1), FOLLOWS, dtype=torch.int32)))
    assert torch.equal(told, followed) and first.flatten().tolist() != [5, 9]


def check(graph: graphs.Graph, target: targets.Target) -> None:
    graph.shown = target
    given = inputs(graph, target)
    exported = torch.export.export(graph, (), given, strict=False)
    assert not exported.range_constraints  # no symbolic, hence no data-dependent, shape
    program = exported.run_decompositions({})
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    assert not [str(n.target) for n in calls if any(word in str(n.target) for word in HOST)]
    assert not [problem for n in calls for problem in problems(n)]
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
    check_plain(graph, want, start)
    for name in names:
        assert graph.get_buffer(name) is not held[name] and torch.equal(held[name], start[name])
        assert torch.equal(graph.get_buffer(name), exported.get_buffer(name)) and not torch.equal(graph.get_buffer(name), start[name])


def check_plain(graph: graphs.Graph, got: tuple[torch.Tensor, ...], start: dict[str, torch.Tensor]) -> None:
    """The same step by the plain verbs: the same ids, numbers and KV as close as float32 is."""
    target, columns = graph.shown, graph.kv.columns
    if not isinstance(target, Shape):
        return
    batch, held = filled(graph, target), [start[n][:, :, :columns].clone() for n in graphs.states(graph.kv)]
    if graph._border.feedback:
        batch.tokens = graphs.follow(batch.tokens, start["ids"], batch.rows)
    kv = Kv(graph.kv, list(zip(held[::2], held[1::2], strict=True)))
    with torch.no_grad():
        want = graphs.outputs(graph._program(ops.PLAIN, Solo(), graph._weights(), kv, batch, target), target)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other) if one.dtype == torch.int32 else (one - other).abs().max() < 2e-5
    made = [graph.get_buffer(n)[: graph.kv.space.blocks, :, :columns] for n in graphs.states(graph.kv)]
    for one, other in zip(made, (store for layer in kv.layers for store in layer), strict=True):
        assert (one - other[: graph.kv.space.blocks]).abs().max() < 2e-5


def test_what_is_exported_is_what_is_imported_and_copied(llama: graphs.Graph) -> None:
    """Blocks go out by one graph, come back into others by the next, and are copied by the third."""
    graph, generator = llama, torch.Generator().manual_seed(8)
    for name in graphs.states(graph.kv):
        setattr(graph, name, torch.randn(graph.get_buffer(name).shape, generator=generator))
    before = torch.stack([graph.get_buffer(n) for n in graphs.states(graph.kv)])  # 2 layers, N H S D

    def ids(*blocks: int) -> torch.Tensor:
        return torch.tensor([*blocks, *[SPACE.scratch] * (4 - len(blocks))], dtype=torch.int32)

    with torch.no_grad():
        graph.shown = Move("kv_export", 4)
        (values,) = graph(moved=ids(0, 5))
        graph.shown = Move("kv_import", 4)
        graph(moved=ids(7, 1), values=values)
        graph.shown = Move("kv_copy", 4)
        graph(source=ids(7, 2), target=ids(3, 6))
    after = torch.stack([graph.get_buffer(n) for n in graphs.states(graph.kv)])
    parts = values[:, :2].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)  # keys and values of a layer, as the states are
    assert torch.equal(parts, before[:, [0, 5]])
    assert torch.equal(after[:, :9], before[:, [0, 5, 2, 0, 4, 5, 2, 0, 8]])


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("target", [*TARGETS, ONCE[3]], ids=targets.name)
def test_one_block_a_row_exports(tmp_path: Path, target: targets.Target) -> None:
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
        made = graphs.Graph(program, Solo(), {"top": {}, "layers": []}, kv, torch.float32)
        made.shown = shape
        given = graphs.example(shape, kv, torch.float32)
        with pytest.raises(Exception, match="[Dd]ata-dependent|unbacked|u0" if program is host_read else "leaves kv_1_k as it was"):
            torch.export.export(made, (), given, strict=False)


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_a_graph_holds_what_was_planned(family: str, tmp_path: Path) -> None:
    """Weights and states by the byte, constants aside: a tied head lies there twice, and a row has columns for what is forgotten."""
    graph = opened(family, tmp_path, space=WHOLE_ROWS)
    config = parse({"model": {"path": str(tmp_path)}, "device": "neuron", "dtype": "fp32", "max_model_len": 32, "max_num_seqs": 3})
    raw = hub.read_config(tmp_path)
    planned = memory(config, raw, capacity_of(config, raw), 1, range(2))
    weights = sum(p.nbytes for name, p in graph.named_parameters() if name not in ("top.embed.first", "top.rope.freq"))
    assert (planned.weights, planned.kv) == (weights, sum(b.nbytes for b in graph.buffers()))


def test_names_and_service() -> None:
    shapes = [Shape("decode", 4, 1, 128, want) for want in (LIKELIEST, SAMPLED, LOGITS)]
    assert [targets.name(t) for t in targets.targets(shapes, SPACE)] == [
        "decode_b4_t1_l128_likeliest_last", "decode_b4_t1_l128_sampled_logits_last", "kv_export_n16", "kv_import_n16", "kv_copy_n16",
    ]  # fmt: skip
    assert graphs.input_names(Shape("prefill", 1, 16, 32, LIKELIEST)) == ("tokens", "positions", "blocks", "slots", "last")
    read = graphs.input_names(Shape("decode", 1, 1, 32, LIKELIEST), Border(feedback=True))
    assert read == ("tokens", "positions", "rows", "blocks", "slots")


def test_everything_a_step_reads_travels_in_two_arrays() -> None:
    """Finding 24: what is packed comes out again, field by field; hidden states are apart."""
    for border in (WHOLE, Border(feedback=True), Border(first=False, hidden=4)):
        for shape in (Shape("decode", 2, 1, 32, LOGITS), Shape("prefill", 2, 16, 32, LOGITS), Shape("verify", 2, 3, 32, EVERY[LOGITS])):
            given = idle(shape, SPACE)
            for i, name in enumerate(SCHEMA):
                value = getattr(given, name)
                if value is not None:
                    value.copy_(torch.arange(value.numel()).view(value.shape) + 1000 * i)
            given.hidden = torch.zeros(shape.rows, shape.tokens, 4)
            made = graphs.pack(given, shape, border)
            assert made.keys() <= {"ints", "floats", "hidden"} and all(len(t) == shape.rows for t in made.values())
            back = graphs.unpack({"floats": None, "hidden": None, **made}, shape, KvShape(SPACE, 1, 1, 4), border)
            for name in graphs.input_names(shape, border):
                assert torch.equal(getattr(back, name), getattr(given, name)), name
