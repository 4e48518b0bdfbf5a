"""Every family and shape exports: static shapes, no host read, no data-dependent branch, nothing written in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayneuron.models import decoder, ops
from rayneuron.models.collectives import Solo
from rayneuron.models.kv import Kv, Places
from tests.models import cases
from tests.models.cases import Runner

ONE_OF_EACH = ("llama", "mistral", "mixtral", "qwen3_moe", "gpt2", "gpt_bigcode", "opt_350m", "bloom", "gpt_neox", "gptj", "dbrx",
               "phi3", "gemma2", "gemma3_text", "olmo2", "qwen2_moe", "granite", "starcoder2", "stablelm",
               "falcon_new", "gpt_oss", "cohere2", "nemotron", "granitemoe")  # fmt: skip
FAST = ("mixtral", "gpt2", "bloom", "gemma3_text")  # between them every kind of norm, position and feed-forward
FORBIDDEN = ("nonzero", "aten.item", "_local_scalar", "unique", "masked_select", "sym_size")


class Whole(torch.nn.Module):
    """The decoder with its architecture bound; KV goes in, and comes out as it is afterwards."""

    def __init__(self, runner: Runner, length: int) -> None:
        super().__init__()
        self.arch, self.shape, self.length = runner.arch, runner.kv.shape, length

    def forward(self, weights, kv: list[tuple[Tensor, Tensor]], tokens: Tensor, positions, rows, blocks, slots) -> tuple[Tensor, list]:
        held = Kv(self.shape, list(kv))
        hidden = decoder.forward(self.arch, ops.PLAIN, Solo(), weights, held, tokens, Places(positions, rows, blocks, slots, self.length))
        return decoder.logits(self.arch, ops.PLAIN, Solo(), weights, hidden), held.layers


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, from inside run_decompositions
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in ONE_OF_EACH])
def test_exports_and_writes_nothing_in_place(name: str, tmp_path: Path) -> None:
    saved = cases.save(cases.CONFIGS[name](), tmp_path, tokens=16)
    runner = Runner.open(tmp_path, Solo())
    weights = {k: v for k, v in runner.weights.items() if k != "first"}
    rows = torch.tensor([2, 0], dtype=torch.int32)
    for start, stop in ((5, 6), (6, 9)):  # decode, and several tokens of which others stand before: prefill in chunks, verify
        at = torch.arange(start, stop, dtype=torch.int32).expand(2, -1).contiguous()
        where = runner.places(at, rows, 32)
        before = [tuple(t.clone() for t in layer) for layer in runner.kv.layers]
        inputs = (weights, runner.kv.layers, saved.ids[:, start:stop].contiguous(), at, rows, where.blocks, where.slots)
        program = torch.export.export(Whole(runner, 32), inputs)
        bad = [str(n.target) for n in program.graph.nodes if n.op == "call_function" and any(f in str(n.target) for f in FORBIDDEN)]
        assert not bad
        assert not program.range_constraints  # no symbolic shape
        with torch.no_grad():
            (got, kv), (want, mine) = program.module()(*inputs), Whole(runner, 32)(*inputs)
        assert torch.equal(got, want)
        for (k, v), (k_mine, v_mine), (k_before, v_before), (k_now, v_now) in zip(kv, mine, before, runner.kv.layers, strict=True):
            assert torch.equal(k, k_mine) and torch.equal(v, v_mine) and not torch.equal(k, k_before)
            assert torch.equal(k_now, k_before) and torch.equal(v_now, v_before)
