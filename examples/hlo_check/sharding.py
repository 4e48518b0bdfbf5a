"""Our shard of a weight beside neuronx-distributed's own, taken from its source. The packages it imports are replaced by empty ones."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ABSENT = (
    *("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib", "lightning", "pytorch_lightning"),
    *("boto3", "botocore", "tenacity", "scipy", "einops"),
)


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below ABSENT and fills it with mocks."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__, module.__version__ = spec, [], spec.name, "2.9"
        module.__file__ = spec.name
        return module

    def exec_module(self, module: Any) -> None:
        return None


def check(source: Path) -> str:
    """Shards of a column-, a row-parallel layer and of an embedding over 4 ranks; raises AssertionError where NxD cuts otherwise."""
    sys.meta_path.insert(0, Empty())
    sys.path.insert(0, str(source))
    import torch
    import torch_neuronx.utils as utils
    import torch_neuronx.utils.utils as platform

    torch.classes.neuron = MagicMock()

    platform.get_platform_target = utils.get_platform_target = lambda *_: "trn1"
    from neuronx_distributed.parallel_layers import layers
    from neuronx_distributed.trace.functions import shard_checkpoint
    from neuronx_distributed.trace.parallel_context import NxDParallelState

    from rayneuron import models
    from rayneuron.models import weights

    config = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    import __main__

    arch, family = models.architecture(config), models.family(config)
    checkpoint = __main__.Checkpoint(arch, family, False)
    ours = [weights.load(arch, family, checkpoint, dtype=torch.float32, rank=r, ranks=4, fused=False) for r in range(4)]
    with NxDParallelState(world_size=4, tensor_model_parallel_size=4, lnc_size=1):
        root = torch.nn.Module()
        root.q = layers.ColumnParallelLinear(64, 64, bias=False, gather_output=False)
        root.up = layers.ColumnParallelLinear(64, 128, bias=False, gather_output=False)
        root.o = layers.RowParallelLinear(64, 64, bias=False, input_is_parallel=True)
        root.down = layers.RowParallelLinear(128, 64, bias=False, input_is_parallel=True)
        root.embed = layers.ParallelEmbedding(96, 64)
        pre = "model.layers.0."
        names = {"q": pre + "self_attn.q_proj", "up": pre + "mlp.up_proj", "o": pre + "self_attn.o_proj", "down": pre + "mlp.down_proj",
                 "embed": "model.embed_tokens"}  # fmt: skip
        theirs = shard_checkpoint({f"{n}.weight": checkpoint[f"{path}.weight"].clone() for n, path in names.items()}, root)
    compared = 0
    for rank, shard in enumerate(theirs):
        for name in names:
            mine = ours[rank]["top"]["embed.w"] if name == "embed" else ours[rank]["layers"][0][f"{name}.w"]
            assert torch.equal(shard[f"{name}.weight"], mine), f"{name} of rank {rank}"
            compared += 1
    return f"{compared} shards equal over 4 ranks"
