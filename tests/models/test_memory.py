"""Parameters are counted without torch; a rank maps the checkpoint and keeps its share only."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch

from rayneuron import models
from rayneuron.models import hub, memory
from tests.models.checkpoint import checkpoint_shapes

ROOT = Path(__file__).resolve().parents[2]
GIB_MODEL = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 7,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
LOADER = """
import json, sys, torch
from rayneuron import models
from rayneuron.models import hub, weights
def high(): return next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmHWM'))
config = hub.read_config(sys.argv[1]); arch, family = models.architecture(config), models.family(config)
before = high()
held = weights.load(arch, family, hub.Checkpoint(sys.argv[1]), dtype=torch.bfloat16, rank=1, ranks=4)
print(json.dumps({"peak": high() - before, "held": weights.held_bytes(held)}))
"""


def test_counting_a_large_model_takes_no_memory_nor_time() -> None:
    """Llama 3 70B at 32 ranks by hand: 70.55 billion parameters, of which a rank holds a share, norms and replicated KV heads."""
    config = {
        **GIB_MODEL,
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    config["tie_word_embeddings"] = False
    arch, family = models.architecture(config), models.family(config)
    whole, share = memory.parameters(arch, family), memory.parameters(arch, family, ranks=32)
    assert whole.products + whole.others == 70_553_706_496
    replicated = 80 * 2 * (32 - 8) * 128 * 8192 // 32  # K and V of 32 heads where 8 would do, a 32nd each
    norms = 161 * 8192
    assert share.products + share.others == (70_553_706_496 - norms) // 32 + replicated + norms


def test_planning_needs_no_torch() -> None:
    script = (
        "import sys, rayneuron.placement.plan; from rayneuron import models\n"
        "for name in models.FAMILIES: models.family({'model_type': name})\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.slow
def test_a_rank_reads_lean(tmp_path: Path) -> None:
    """A sharded checkpoint of 1 GB at TP 4: peak <= its share + one tensor + 200 MB (BR-92), and the count within 1 % of the truth."""
    (tmp_path / "config.json").write_text(json.dumps(GIB_MODEL))
    arch, family = models.architecture(GIB_MODEL), models.family(GIB_MODEL)
    shapes = dict(checkpoint_shapes(arch, family))
    where = {n: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, n in enumerate(shapes)}
    for file in sorted(set(where.values())):
        mine = {n: (torch.bfloat16, shapes[n]) for n in shapes if where[n] == file}
        with hub.writer(tmp_path / file, mine) as write:
            for n, (dtype, shape) in mine.items():
                write(n, torch.full(shape, 0.5, dtype=dtype))
    (tmp_path / hub.INDEX).write_text(json.dumps({"weight_map": where}))
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) > 0.95e9
    ran = subprocess.run([sys.executable, "-c", LOADER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=280)
    found = json.loads(ran.stdout)
    count = memory.parameters(arch, family, ranks=4)
    print(found, count)
    assert found["held"] == pytest.approx(2 * (count.products + count.others), rel=0.01)
    assert found["peak"] <= found["held"] + 2 * max(prod(shape) for shape in shapes.values()) + 200e6
