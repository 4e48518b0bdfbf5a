"""The demo model on a shipped text: perplexity equals transformers' in float32, and stays within stated bounds in every smaller form."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers as tf

from rayneuron import models
from rayneuron.models import decoder, hub, ops, quantization, weights
from rayneuron.models.collectives import Solo
from rayneuron.models.kv import KvSpace
from rayneuron.models.memory import kv_shape
from tests.models import runs

TEXT = Path(__file__).with_name("perplexity.txt")
TOKENS = 512
# Most relative change of perplexity against float32 (27.107 on this text); measured: +0.16 %, +0.02, +2.5, +1.0, +2.7, +5.8, -0.5, +3.7.
BOUNDS = {
    "bf16": 0.005, "int8/per_channel": 0.005, "int8/per_tensor": 0.05, "f8e4m3/per_channel": 0.02, "f8e4m3/per_tensor": 0.05,
    "f8e5m2/per_channel": 0.10, "kv:f8e4m3": 0.015, "kv:f8e5m2": 0.06,
}  # fmt: skip


@pytest.fixture(scope="module")
def ids(smollm2: Path) -> torch.Tensor:
    from tokenizers import Tokenizer

    return torch.tensor([Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(TEXT.read_text()).ids[:TOKENS]], dtype=torch.int32)


def perplexity(
    path: Path, ids: torch.Tensor, *, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None, how=None
) -> float:
    """exp of the mean negative log-likelihood, in chunks of 128 tokens."""
    config, n = hub.read_config(path), ids.shape[1]
    arch = models.architecture(config)
    held = weights.load(arch, models.family(config), hub.Checkpoint(path), dtype=dtype, quantization=how)
    space = KvSpace(rows=1, limit=n, blocks=1, block=n)
    kv = runs.zeros(kv_shape(arch, space), kv_dtype or dtype)
    total, row = 0.0, torch.zeros(1, dtype=torch.int32)
    with torch.no_grad():
        for start in range(0, n, 128):
            at = torch.arange(start, min(start + 128, n), dtype=torch.int32)[None]
            where = runs.places(space, runs.table(space), at, row, at.shape[1] + start)
            hidden = decoder.forward(arch, ops.PLAIN, Solo(), held, kv, ids[:, start : start + 128], where)
            scores = decoder.logits(arch, ops.PLAIN, Solo(), held, hidden)[0].log_softmax(-1)
            after = ids[0, start + 1 : start + 129].long()
            total -= scores[torch.arange(len(after)), after].sum().item()
    return math.exp(total / (n - 1))


@pytest.fixture(scope="module")
def exact(smollm2: Path, ids: torch.Tensor) -> float:
    return perplexity(smollm2, ids)


def test_float32_equals_transformers(smollm2: Path, ids: torch.Tensor, exact: float) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        theirs = math.exp(model(ids.long(), labels=ids.long()).loss.item())
    print(f"perplexity {exact:.5f}, transformers {theirs:.5f}")
    assert abs(exact - theirs) < 1e-3 * theirs and 3 < exact < 60


@pytest.mark.parametrize("form", [pytest.param(f, marks=() if f in ("bf16", "int8/per_channel") else pytest.mark.slow) for f in BOUNDS])
def test_smaller_forms_stay_within_their_bounds(form: str, smollm2: Path, ids: torch.Tensor, exact: float) -> None:
    dtype, _, scheme = form.partition("/")
    if form == "bf16":
        got = perplexity(smollm2, ids, dtype=torch.bfloat16)
    elif form.startswith("kv:"):
        got = perplexity(smollm2, ids, kv_dtype=quantization.parse_kv(form.removeprefix("kv:")))
    else:
        got = perplexity(smollm2, ids, how=quantization.parse(dtype, scheme))
    change = got / exact - 1
    print(f"{form}: perplexity {got:.4f}, {100 * change:+.2f} %")
    assert abs(change) < BOUNDS[form] and got != exact
