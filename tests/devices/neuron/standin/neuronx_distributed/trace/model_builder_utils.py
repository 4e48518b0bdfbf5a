"""Stand-in: what tracing and compiling leave behind."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass
class ModelParamInfo:
    param_name: str
    is_positional: bool


class TraceArtifacts:
    def __init__(self, hlo, metaneff, flattener, packer, weight_name_to_idx, weight_names_to_skip, provided_args, model_params):
        self.hlo, self.metaneff, self.flattener, self.packer = hlo, metaneff, flattener, packer
        self.weight_name_to_idx, self.weight_names_to_skip = weight_name_to_idx, weight_names_to_skip
        self.provided_args, self.model_params = provided_args, model_params


class CompilationArtifacts:
    def __init__(self, neff_filepath):
        self.neff_filepath = neff_filepath

    def get_neff_bytes(self):
        return Path(self.neff_filepath).read_bytes()


class WLOArtifacts(CompilationArtifacts):
    def __init__(self, neff_filepath, wrapped_neff_hlo_filepath=None):
        super().__init__(neff_filepath)
        self.wrapped_neff_hlo_filepath = wrapped_neff_hlo_filepath


class LayoutTransformerArtifacts:
    def __init__(self, hlo_filepath, neff_filepath, metaneff_filepath):
        self.hlo_filepath, self.neff_filepath, self.metaneff_filepath = hlo_filepath, neff_filepath, metaneff_filepath

    def construct_layout_transformer_object(self, local_ranks_size):
        return Layout(**json.loads(Path(self.neff_filepath).read_text()), local_ranks_size=local_ranks_size)


@dataclass
class Layout:
    """Opaque in the real one: it takes as many checkpoints as it was made for."""

    names: list
    lnc: int
    local_ranks_size: int

    def forward(self, checkpoints):
        if len(checkpoints) != self.local_ranks_size:
            raise RuntimeError(f"LayoutTransformation was built for {self.local_ranks_size} local ranks, and given {len(checkpoints)}")
        return [{n: t.t().contiguous() if n in self.names else t for n, t in c.items()} for c in checkpoints]
