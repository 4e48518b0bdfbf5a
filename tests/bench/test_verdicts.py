"""Bars of the engine by hand arithmetic: what is compared with what, and what a model costs."""

from __future__ import annotations

import pytest
import verdicts

# Two layers by hand: q 8x8, k and v 4x8, o 8x8, three products of 16x8; a tied table of 10x8; 2 query heads of 4.
TWO_LAYERS = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
LAYER = 64 + 32 + 32 + 64 + 3 * 128


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_model_costs(tied: bool) -> None:
    model = verdicts.Model.read(TWO_LAYERS | {"tie_word_embeddings": tied})
    assert model.step_bytes == 2 * (2 * LAYER + 80), "an input table that is not tied is looked up, not read"
    # Three tokens see 1 + 2 + 3 positions; scores and their use are 2 x 2 operations a position, head and number.
    assert model.prompt_ops(3) == 2 * 3 * 2 * LAYER + 6 * 4 * 8 * 2 + 2 * 80
    assert model.ceiling("decode 1", 1e6) == pytest.approx(1e6 / model.step_bytes)
    assert model.ceiling("prefill 3", 1e6) == pytest.approx(3e6 / model.prompt_ops(3))


def test_the_best_peer_is_none_of_ours_and_in_bf16() -> None:
    rates = {"rayneuron": [9.0], "rayneuron int8": [20.0], "openvino": [1.0, 8.0, 8.0], "vllm": [5.0], "llamacpp int8": [12.0]}
    assert verdicts.best_peer(rates) == "openvino"
    assert verdicts.best_peer({"rayneuron": [9.0]}) is None


def test_bars() -> None:
    model = verdicts.Model.read(TWO_LAYERS)
    beside = {"decode 1": [model.step_bytes * 100.0] * 2}
    rates = {
        "decode 1": {
            "rayneuron": [90.0, 80.0], "rayneuron int8": [150.0, 120.0], "llamacpp": [50.0, 100.0], "llamacpp int8": [100.0, 100.0],
        },
        "decode 8": {"rayneuron": [10.0, 10.0], "vllm": [9.0, 9.0], "openvino": [3.0, 3.0]},
        "decode 3": {"rayneuron": [1.0, 1.0]},
    }  # fmt: skip
    judged = {row[0]: row[1:] for row in verdicts.judge(rates, beside, model)}
    assert judged == {
        "decode 1: rayneuron / what memory can feed": (pytest.approx(0.85), ">= 0.85", "met"),
        "decode 1: rayneuron / llamacpp": (pytest.approx(1.3), ">= 1", "met"),
        "decode 1: rayneuron int8 / rayneuron": (pytest.approx((150 / 90 + 120 / 80) / 2), ">= 1.6", "MISSED"),
        "decode 1: rayneuron int8 / llamacpp int8": (pytest.approx(1.35), ">= 1.2", "met"),
        "decode 8: rayneuron / best peer: vllm": (pytest.approx(10 / 9), ">= 1.2", "MISSED"),
    }
