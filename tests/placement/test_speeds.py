"""Guessed steps against what AWS has published of Llama 3 over all cores of a node (Neuron documentation, inference performance pages)."""

from __future__ import annotations

import pytest

from rayneuron.config import Deployment
from rayneuron.engine.buckets import capacity
from rayneuron.errors import ConfigError
from rayneuron.placement.instances import instance
from rayneuron.placement.prices import PRICES, priced
from rayneuron.placement.speeds import guessed
from rayneuron.policies.cost import Costs

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
B8 = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
B70 = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
# model, int8, instance, rows, prompt, positions at the end, first token of one row in ms (None: a batch's), ms of a token after it
PUBLISHED = [
    (B8, True, "inf2.48xlarge", 1, 2048, 4096, 101.8, 6.50),
    (B8, True, "inf2.48xlarge", 8, 2048, 4096, None, 10.50),
    (B8, True, "inf2.48xlarge", 8, 4096, 8192, None, 15.31),
    (B70, False, "inf2.48xlarge", 1, 1024, 2048, 310.2, 33.1),
    (B70, False, "inf2.48xlarge", 1, 2048, 4096, 745.5, 34.7),
    (B8, True, "trn1.32xlarge", 1, 128, 4096, 14.8, 5.86),
    (B8, True, "trn1.32xlarge", 8, 4096, 8192, None, 10.04),
    (B70, False, "trn1.32xlarge", 1, 128, 2048, 53.2, 24.5),
    (B70, False, "trn1.32xlarge", 1, 2048, 4096, 547.0, 26.2),
    (B70, False, "trn1.32xlarge", 4, 2048, 4096, None, 32.3),
]


@pytest.mark.parametrize(("raw", "int8", "name", "rows", "prompt", "length", "first_ms", "then_ms"), PUBLISHED)
def test_guesses_are_near_what_was_published(
    raw: dict, int8: bool, name: str, rows: int, prompt: int, length: int, first_ms: float | None, then_ms: float
) -> None:
    found = instance(name)
    words = {"model": {"path": "/m"}, "device": "neuron", "tensor_parallel": found.cores, "quantization": "int8" if int8 else None}
    config = Deployment.model_validate({k: v for k, v in words.items() if v is not None})
    c = capacity(rows=rows, length=length, chunk=prompt, few=True, batch=[1, rows], context=[128, prompt], lengths=[length])
    costs = Costs(guessed(config, raw, c, found))
    assert costs.decode_ms(rows, length) == pytest.approx(then_ms, rel=0.3)
    if first_ms is not None:
        assert costs.prefill(prompt, 0)[0] == pytest.approx(first_ms, rel=0.35)


def test_prices_can_be_said() -> None:
    assert priced([]) == dict(PRICES)
    assert priced(["inf2.xlarge=0.5"])["inf2.xlarge"].usd == 0.5
    for wrong, said in (("p5.48xlarge=3", "unknown instance"), ("inf2.xlarge=much", "write US dollars an hour"), ("inf2.xlarge=-1", "US")):
        with pytest.raises(ConfigError, match=said):
            priced([wrong])
