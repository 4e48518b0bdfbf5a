"""Every family and shape exports: static shapes, no host read, no data-dependent branch, and KV updated in place (what Neuron compiles)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayneuron.models import decoder, ops
from rayneuron.models.collectives import Solo
from tests.models import cases
from tests.models.cases import Runner

ONE_OF_EACH = ("llama", "mistral", "mixtral", "qwen3_moe", "gpt2", "gpt_bigcode", "opt_350m", "bloom", "gpt_neox", "gptj", "dbrx")
FAST = ("llama", "mixtral", "gpt2", "bloom")  # between them every kind of norm, position and feed-forward
FORBIDDEN = ("nonzero", "aten.item", "_local_scalar", "unique", "masked_select", "sym_size")


class Whole(torch.nn.Module):
    """The decoder with its architecture bound; KV is an input that is written."""

    def __init__(self, arch, length: int) -> None:
        super().__init__()
        self.arch, self.length = arch, length

    def forward(self, weights, kv: list[Tensor], tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        hidden = decoder.forward(self.arch, ops.PLAIN, Solo(), weights, kv, tokens, positions, rows, self.length)
        return decoder.logits(self.arch, ops.PLAIN, Solo(), weights, hidden)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, from inside run_decompositions
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in ONE_OF_EACH])
def test_exports_with_kv_in_place(name: str, tmp_path: Path) -> None:
    saved = cases.save(cases.CONFIGS[name](), tmp_path, tokens=16)
    runner = Runner.open(tmp_path, Solo())
    weights = {k: v for k, v in runner.weights.items() if k != "first"}
    rows = torch.tensor([2, 0], dtype=torch.int32)
    for start, stop in ((0, 16), (5, 6), (6, 9)):  # prefill, decode, verify
        at = torch.arange(start, stop, dtype=torch.int32).expand(2, -1).contiguous()
        inputs = (weights, [t.clone() for t in runner.kv], saved.ids[:, start:stop].contiguous(), at, rows)
        program = torch.export.export(Whole(runner.arch, 32), inputs)
        bad = [str(n.target) for n in program.graph.nodes if n.op == "call_function" and any(f in str(n.target) for f in FORBIDDEN)]
        assert not bad
        assert not program.range_constraints  # no symbolic shape
        mine = [t.clone() for t in runner.kv]
        with torch.no_grad():
            got = program.module()(*inputs)
            want = Whole(runner.arch, 32)(weights, mine, *inputs[2:])
        assert torch.equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(inputs[1], mine, strict=True)) and inputs[1][0].any()
        if stop - start > 1:
            continue  # one shape is enough to see that KV, and nothing else, is written
        written = program.run_decompositions({}).graph_signature.user_inputs_to_mutate.values()
        assert len(written) == len(runner.kv) and all(name.startswith("kv_") for name in written)
