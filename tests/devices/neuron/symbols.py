"""Every symbol of neuronx_distributed and torch_neuronx that rayneuron uses, with its parameters as the public source has them.

Read from aws-neuron/neuronx-distributed at v2.28.0 (neuronx-distributed 0.17.26814, SDK 2.28). `since`: the first tag that has it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symbol:
    """`owner` is the class of a method, "" for a function or for a class, whose parameters are its constructor's. * marks keyword-only."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]
    since: str = "2.26"

    @property
    def dotted(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.name)))


_TRACE = "neuronx_distributed.trace"
_MODEL = f"{_TRACE}.nxd_model.nxd_model"
_MAPPINGS = "neuronx_distributed.parallel_layers.mappings"

SYMBOLS = (
    Symbol(f"{_TRACE}.functions", "", "trace",
           ("model", "args", "kwargs", "spmd", "preserve_parameters", "weights_to_skip_layout_optimization"), "2.27"),
    Symbol(f"{_TRACE}.functions", "", "compile", ("hlo_module", "metaneff", "compiler_workdir", "compiler_args", "key"), "2.27"),
    Symbol(f"{_TRACE}.functions", "", "compile_wlo", ("hlo_module", "metaneff", "compiler_workdir", "compiler_args", "key"), "2.27"),
    Symbol(f"{_TRACE}.functions", "", "compile_layout_transformer",
           ("wlo_artifacts", "priority_model_weight_name_to_idx", "compiler_workdir", "logical_nc_config"), "2.27"),
    Symbol(f"{_TRACE}.hlo_utils", "", "mark_weights_for_wlo", ("trace_artifacts", "weights_to_skip_layout_optimization")),
    Symbol(f"{_TRACE}.hlo_utils", "", "apply_layout_transformation",
           ("trace_artifacts", "priority_model_trace_artifacts", "wlo_artifacts", "key")),
    Symbol(f"{_TRACE}.model_builder_utils", "", "TraceArtifacts",
           ("hlo", "metaneff", "flattener", "packer", "weight_name_to_idx", "weight_names_to_skip", "provided_args", "model_params")),
    Symbol(f"{_TRACE}.model_builder_utils", "", "CompilationArtifacts", ("neff_filepath",)),
    Symbol(f"{_TRACE}.model_builder_utils", "", "WLOArtifacts", ("neff_filepath", "wrapped_neff_hlo_filepath")),
    Symbol(f"{_TRACE}.model_builder_utils", "", "LayoutTransformerArtifacts", ("hlo_filepath", "neff_filepath", "metaneff_filepath")),
    Symbol(_MODEL, "", "NxDModel", ("world_size", "start_rank", "local_ranks_size", "state_initializer", "layout_transformer")),
    Symbol(_MODEL, "NxDModel", "add", ("key", "trace_artifacts", "compilation_artifacts")),
    Symbol(_MODEL, "NxDModel", "set_weights", ("sharded_checkpoint",)),
    Symbol(_MODEL, "NxDModel", "to_neuron", ()),
    Symbol(_MODEL, "NxDModel", "replace_weights", ("sharded_checkpoint",)),
    Symbol(_MODEL, "NxDModel", "read_from_neuron_buffer", ("buffer_key", "rank")),
    Symbol(_MODEL, "NxDModel", "write_to_neuron_buffer", ("tensor", "buffer_key", "rank")),
    Symbol(_MODEL, "NxDModel", "forward", ("*args", "*model_name", "*forward_mode", "**kwargs")),
    Symbol(_MODEL, "NxDModel", "save", ("path_to_save", "save_weights")),
    Symbol(_MODEL, "NxDModel", "load", ("path_to_model", "start_rank", "local_ranks_size")),
    Symbol(f"{_TRACE}.parallel_context", "", "NxDParallelState",
           ("world_size", "rank", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "lnc_size")),
    Symbol(_MAPPINGS, "", "reduce_from_tensor_model_parallel_region", ("input_", "process_group")),
    Symbol(_MAPPINGS, "", "_gather_along_dim", ("x", "partition_dim", "process_group", "tile_cc")),
    Symbol(_MAPPINGS, "", "_reduce_scatter_along_dim", ("x", "partition_dim", "computation", "process_group", "tile_cc")),
)  # fmt: skip
# What its source says of torch_neuronx, whose own source is not public: name, and how neuronx_distributed itself calls it.
CLOSED = (
    ("torch_neuronx.utils", "get_platform_target"),
    *(("torch_neuronx.xla_impl.ops", name) for name in ("Argmax", "Softmax", "TopK")),  # RmsNorm only in its examples
)
FORWARD_MODES = ("default", "ranked", "ranked_to_cpu", "async")
