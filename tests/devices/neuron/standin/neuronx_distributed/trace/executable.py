"""Stand-in: a traced graph, what is HLO there, and how it runs. A state is a buffer that was rebound, as ModelBuilder v2 documents."""

import warnings
from dataclasses import dataclass, field, replace

import torch
from torch.export._trace import _export
from torch.export.graph_signature import InputKind
from torch.fx.graph_module import _format_import_block
from torch.overrides import TorchFunctionMode
from torch.package import sys_importer
from torch_neuronx.proto.metaneff_pb2 import MetaNeff, MetaTensor

HOST = ("aten.item", "_local_scalar", "nonzero", "masked_select", "multinomial", "unique")
NUMERICAL = "NRT_EXEC_COMPLETED_WITH_NUM_ERR (1003)"


class NoAttention(TorchFunctionMode):
    """Refuses torch's own attention, of which a trace leaves nothing to be found."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            said = "has no kernel there: torch's math form multiplies in float32 and copies K and V (finding 6)"
            raise RuntimeError(f"{function.__name__} {said}")
        return function(*args, **(kwargs or {}))


def exported(model, names, tensors):
    """The exported program of `model`, and its states' names in the order of its last outputs. Raises for a buffer written in place."""
    states = []

    class States(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *given):
            modules = dict(self.model.named_modules())
            before = {(n, k): (b, b._version) for n, m in modules.items() for k, b in m._buffers.items()}
            with NoAttention():
                out, values = self.model(**dict(zip(names, given, strict=True))), []
            states.clear()
            for (name, key), (buffer, version) in before.items():
                now = modules[name]._buffers[key]
                path = f"{name}.{key}".strip(".")
                if now is buffer:
                    if buffer._version != version:
                        raise RuntimeError(f"in-place operation on buffer {path}: Not Supported; rebind it (ModelBuilder v2 API reference)")
                    continue
                states.append(path)
                values.append(now)
                modules[name]._buffers[key] = buffer
            return (tuple(out) if isinstance(out, tuple | list) else (out,)), tuple(values)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own
        # Functional at once: export().run_decompositions({}), which says the same in public names, traces a second time for it.
        program = _export(States(), tuple(tensors), strict=False, pre_dispatch=False)
    for node in program.graph.nodes:
        if node.op == "call_function" and any(word in str(node.target) for word in HOST):
            raise RuntimeError(f"{node.target} reads on the host")
    return program, states


@dataclass
class Executable:
    """One graph. `source`: its Python; `sources`: where its arguments come from; `states`: its last outputs; `turned`: weights it expects
    transposed."""

    source: str
    sources: list
    states: list
    inputs: dict
    shapes: dict
    nodes: list
    outputs: int
    turned: frozenset = frozenset()
    marked: bool = False
    flags: dict = field(default_factory=dict)
    _forward: object = None

    @classmethod
    def of(cls, program, states, model, inputs):
        kinds = {InputKind.CONSTANT_TENSOR: "constant", InputKind.USER_INPUT: "input"}
        given, sources = iter(inputs), []
        placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        for spec in program.graph_signature.input_specs:
            kind = kinds.get(spec.kind, "held")
            node = placeholders[spec.arg.name]
            if kind == "input":
                sources.append((kind, next(given)))
            elif not node.users:
                program.graph.erase_node(node)  # a weight of other graphs
            elif kind == "constant":
                sources.append((kind, program.constants[spec.target].clone()))
            else:
                name = spec.target.removeprefix("model.")
                sources.append(("state" if name in states else "weight", name))
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in held.items()}
        nodes = [_seen(node) for node in program.graph.nodes if node.op == "call_function"]
        outputs = len(program.graph_signature.user_outputs) - len(states)
        _as_the_chip_does(program.graph)
        code = program.graph.python_code("self")
        source = _format_import_block(code.globals, sys_importer) + code.src
        return cls(source, sources, states, {n: (tuple(t.shape), t.dtype) for n, t in inputs.items()}, shapes, nodes, outputs)

    @property
    def weights(self):
        """Names of the weights it uses, by their place among its arguments."""
        return {name: i for i, (kind, name) in enumerate(self.sources) if kind == "weight"}

    @property
    def text(self):
        """All that a compiler is given, the same in every process."""
        said = [(kind, name.tolist() if kind == "constant" else name) for kind, name in self.sources]
        shapes = {name: self.shapes[name] for kind, name in self.sources if kind in ("weight", "state")}
        return repr((self.source, said, self.states, self.inputs, shapes, sorted(self.turned), self.marked))

    def metaneff(self):
        kinds = {"input": MetaTensor.Type.USER_INPUT, "weight": MetaTensor.Type.INPUT_WEIGHT, "state": MetaTensor.Type.INPUT_STATE}
        listed = [(k, n) for k, n in self.sources if k != "constant"]
        about = {**self.inputs, **self.shapes}
        tensors = [MetaTensor(kinds[k], n.encode() if k != "input" else b"", *about[n]) for k, n in listed]
        places = {n: i for i, (k, n) in enumerate(listed) if k == "state"}
        if set(places) != set(self.states):
            raise RuntimeError(f"states {sorted(set(self.states) - set(places))} are rebound and not read: nothing can be aliased")
        return MetaNeff(tensors, {self.outputs + i: places[name] for i, name in enumerate(self.states)})

    def run(self, weights, states, inputs):
        given = []
        for kind, name in self.sources:
            if kind == "constant":
                given.append(name)
            elif kind == "weight":
                given.append(weights[name].t() if name in self.turned else weights[name])
            else:
                given.append((inputs if kind == "input" else states)[name])
        if self._forward is None:
            scope = {}
            exec(self.source, scope)
            self._forward = scope["forward"]
        made = self._forward(None, *given)
        states.update(zip(self.states, made[self.outputs :], strict=True))
        return made[: self.outputs]


@dataclass
class Hlo:
    """What stands for an HLO module."""

    executable: Executable

    def SerializeToString(self, deterministic=None):
        return self.executable.text.encode()

    def change(self, **fields):
        self.executable = replace(self.executable, **fields)


@dataclass
class Node:
    """A node as the compiler sees it: its operator, and dtype and shape of what goes in and out."""

    operator: str
    given: list
    made: list
    scalars: list = field(default_factory=list)


def _seen(node):
    scalars = [a for a in _flat((*node.args, *node.kwargs.values())) if isinstance(a, bool | int | float)]
    given = [n.meta.get("val") for n in node.all_input_nodes]
    return Node(str(node.target), _about(given), _about(_flat([node.meta.get("val")])), scalars)


def _about(values):
    return [(v.dtype, tuple(v.shape)) for v in values if isinstance(v, torch.Tensor)]


def _flat(values):
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def select(mask, yes, no, dtype):
    """A select as a masked sum, which turns an infinity that is not taken into NaN."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return torch.where(mask, yes, no)
    taken = mask.to(dtype)
    return taken * yes + (1 - taken) * no


def sound(value, where):
    """`value`, unless it holds a NaN."""
    if bool(torch.isnan(value).any()):
        raise RuntimeError(f"{NUMERICAL}: NaN in {where}")
    return value


def _as_the_chip_does(graph):
    """Selects as masked sums; and NaN is looked for where it would be lost from sight: in outputs, and where floats turn into others."""
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target).startswith("aten.where"):
            node.args, node.target = (*node.args, node.meta["val"].dtype), select
        whole = [v for v in _flat([node.meta.get("val")]) if isinstance(v, torch.Tensor)]
        lost = node.op == "output" or (node.op == "call_function" and any(not v.dtype.is_floating_point for v in whole))
        for given in node.all_input_nodes if lost else ():
            value = given.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dtype.itemsize > 1 and given.op != "placeholder":
                with graph.inserting_after(given):
                    checked = graph.call_function(sound, (given, str(given)))
                checked.meta = dict(given.meta)
                node.replace_input_with(given, checked)
    graph.lint()
