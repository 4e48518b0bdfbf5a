"""Stand-in: loaded graphs. States are one set for all graphs."""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch

from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.trace.nxd_model import runtime
from neuronx_distributed.trace.nxd_model.fabric import Fabric

BEFORE = []  # called with a graph before it runs: tests hold a step up with it


class Queue:
    """Steps run one after the other on a thread of their own. At most `most` are under way; 0: every call waits for its own."""

    def __init__(self, most):
        self._lane, self._most, self._under_way = runtime.Lane(), most, []

    def put(self, work, outputs=None, ranks=0):
        """A future of the outputs, or with `outputs` a buffer an output and rank that is read with .cpu()."""
        self._under_way = [f for f in self._under_way if not f.done()]
        while self._most and len(self._under_way) >= self._most:
            self._under_way.pop(0).exception()
        future = self._lane.submit(work)
        self._under_way.append(future)
        if outputs is None or not self._most:
            future.result()
        return future if outputs is None else [[Buffer(future, rank, i) for rank in range(ranks)] for i in range(outputs)]


@dataclass
class Buffer:
    """An output on the device: known once the step is done."""

    future: object
    rank: int
    output: int

    def cpu(self):
        return self.future.result()[self.rank][self.output]


def route(inputs):
    """The router's key: names and shapes of the inputs that are given."""
    return "(" + ", ".join(f"{name}: {list(tensor.shape)}" for name, tensor in inputs.items()) + ")"


class NxDModel(torch.nn.Module):
    def __init__(self, world_size, start_rank=None, local_ranks_size=None, state_initializer=None, layout_transformer=None):
        super().__init__()
        if (start_rank is None) != (local_ranks_size is None):
            raise AssertionError("start_rank and local_ranks_size must be set together")
        self.world_size, self.start_rank = world_size, start_rank or 0
        self.local_ranks_size = local_ranks_size or world_size
        self.layout = layout_transformer and layout_transformer.construct_layout_transformer_object(self.local_ranks_size)
        self.graphs, self.built_for, self.model_params, self.input_shape_map = {}, {}, None, {}
        self.weights, self.states, self.loaded_on_neuron = None, None, False
        self.state_names = self.fabric = None

    def add(self, key, trace_artifacts, compilation_artifacts):
        parameters = [(p.param_name, not p.is_positional) for p in trace_artifacts.model_params]
        if self.model_params is None:
            self.model_params = parameters
        if self.model_params != parameters:
            raise AssertionError("The model provided appears to have a different signature than all other models added prior.")
        flattener = trace_artifacts.flattener
        if not isinstance(flattener.layout, tuple):
            raise AssertionError(f"Expected flattener layout type to be tuple but found {type(flattener.layout)}")
        flattener.layout = list(flattener.layout)  # as the real one: a trace can be added once
        executable = pickle.loads(compilation_artifacts.get_neff_bytes())
        if self.state_names is None:
            self.state_names = set(executable.states)
        if set(executable.states) != self.state_names:
            raise RuntimeError(f"{key} has other states than the first graph: {sorted(self.state_names ^ set(executable.states))}")
        self.graphs[key], self.built_for[key] = executable, self.local_ranks_size
        names = {n: torch.empty(shape) for n, (shape, _) in executable.inputs.items()}
        self.input_shape_map.setdefault(route(names), []).append(key)
        return self

    def get_available_keys(self):
        return set(self.graphs)

    def set_weights(self, sharded_checkpoint):
        if self.loaded_on_neuron:
            raise ValueError("set_weights() was called when the model was already loaded on neuron.")
        if len(sharded_checkpoint) != self.local_ranks_size:
            raise RuntimeError(f"{len(sharded_checkpoint)} checkpoints for {self.local_ranks_size} local ranks")
        needed = {name: g.shapes[name] for g in self.graphs.values() for name in g.weights}
        for rank, checkpoint in enumerate(sharded_checkpoint):
            for name, (shape, dtype) in needed.items():
                if name not in checkpoint:
                    raise KeyError(f"weight {name} of rank {rank} is missing")
                if (tuple(checkpoint[name].shape), checkpoint[name].dtype) != (shape, dtype):
                    raise RuntimeError(f"weight {name} of rank {rank} is {tuple(checkpoint[name].shape)}, traced as {shape}")
        laid = self.layout.forward(sharded_checkpoint) if self.layout else sharded_checkpoint
        self.weights = [{name: t.detach().clone() for name, t in c.items()} for c in laid]

    def to_neuron(self):
        if self.loaded_on_neuron:
            return
        for key, count in self.built_for.items():
            if count != self.local_ranks_size:
                raise RuntimeError(f"SPMDModel {key} was built for {count} local ranks, and given those of {self.local_ranks_size}")
        runtime.check(self.graphs.values(), self.layout)
        cores = runtime.claim(self.local_ranks_size)
        runtime.moment("to_neuron")
        shapes = {name: about for g in self.graphs.values() for name, about in g.shapes.items()}
        self.states = [
            {name: torch.zeros(shapes[name][0], dtype=shapes[name][1]) for name in self.state_names} for _ in range(self.local_ranks_size)
        ]
        self._queue = Queue(int(os.environ.get("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS") or 0))
        for core, weights, states in zip(cores, self.weights, self.states, strict=False):
            runtime.allocate(self, core, (*weights.values(), *states.values()), len(self.graphs))
        if self.local_ranks_size != self.world_size:
            self.fabric = Fabric(self.start_rank, self.local_ranks_size, self.world_size)
        self.loaded_on_neuron = True

    def replace_weights(self, sharded_checkpoint):
        self.loaded_on_neuron = False
        self.set_weights(sharded_checkpoint)
        self.to_neuron()

    def read_from_neuron_buffer(self, buffer_key, rank):
        return (self.states[rank].get(buffer_key) if buffer_key in self.states[rank] else self.weights[rank][buffer_key]).clone()

    def write_to_neuron_buffer(self, tensor, buffer_key, rank):
        target = self.states[rank][buffer_key]
        if target.shape != tensor.shape:
            raise KeyError(f"Cannot write tensor of shape {tensor.shape} to neuron buffer with shape {target.shape}")
        target.copy_(tensor)

    def forward(self, *args, model_name=None, forward_mode="default", **kwargs):
        if not self.loaded_on_neuron:
            raise RuntimeError("Model not initialized. Call set_weights() followed by to_neuron()")
        if args or forward_mode not in ("ranked", "async"):
            raise NotImplementedError("the stand-in takes named, ranked inputs only")
        first = {n: kwargs[n][0] for n, _ in self.model_params if n in kwargs}
        if len(first) != len(kwargs):
            raise AssertionError("Not all kwargs were parsed")
        names = self.input_shape_map[route(first)]  # KeyError: no graph of these shapes
        if len(names) > 1 and model_name is None:
            raise AssertionError(f"Got {len(names)} possible routes but model_name wasn't provided.")
        if model_name is not None and model_name not in names:
            raise AssertionError(f"Provided model_name does not match the one found by the shape router: {names}, {model_name}")
        graph = self.graphs[model_name or names[0]]
        for name, tensors in kwargs.items():
            if len(tensors) != self.local_ranks_size:
                raise AssertionError(f"{name}: {len(tensors)} tensors for {self.local_ranks_size} ranks")
            if any((tuple(t.shape), t.dtype) != graph.inputs[name] for t in tensors):
                raise RuntimeError(f"{name} is {tensors[0].dtype} {tuple(tensors[0].shape)}, compiled for {graph.inputs[name]}")
        if forward_mode == "async":
            return self._queue.put(lambda: self._run(graph, kwargs), graph.outputs, self.local_ranks_size)
        ranked = self._queue.put(lambda: self._run(graph, kwargs)).result()
        return [list(outputs) for outputs in zip(*ranked, strict=True)]

    def _run(self, graph, kwargs):
        runtime.moment("forward")
        for before in BEFORE:
            before(graph)
        ring = mappings.Ring(self.local_ranks_size, self.fabric)

        def one(rank):
            mappings.HERE.ring, mappings.HERE.place, mappings.HERE.rank = ring, rank, self.start_rank + rank
            try:
                with torch.no_grad():
                    return graph.run(self.weights[rank], self.states[rank], {n: t[rank] for n, t in kwargs.items()})
            except BaseException:
                ring.barrier.abort()
                raise

        if self.local_ranks_size == 1:
            return [one(0)]
        under_way = [runtime.Lane().submit(one, rank) for rank in range(self.local_ranks_size)]
        return [future.result() for future in under_way]

    def save(self, path_to_save, save_weights=False):
        fields = (self.world_size, self.graphs, self.built_for, self.model_params, self.input_shape_map, self.state_names, self.layout)
        Path(path_to_save).write_bytes(pickle.dumps(fields))

    @classmethod
    def load(cls, path_to_model, start_rank=None, local_ranks_size=None):
        world_size, *fields = pickle.loads(Path(path_to_model).read_bytes())
        model = cls(world_size, start_rank, local_ranks_size)
        model.graphs, model.built_for, model.model_params, model.input_shape_map, model.state_names, model.layout = fields
        return model
