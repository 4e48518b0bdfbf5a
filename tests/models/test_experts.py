"""Mixtures of experts: every form of the product agrees with the plain sum, and only chosen experts are computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.models import experts, feedforward

X, E, FF, K = 5, 16, 24, 2


def weights(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "experts.gate_up.w": torch.randn(X, 2 * FF, E, generator=draw) * 0.2,
        "experts.down.w": torch.randn(X, E, FF, generator=draw) * 0.2,
    }


def by_hand(w: dict[str, Tensor], x: Tensor, which: Tensor, share: Tensor) -> Tensor:
    """One token and one expert at a time."""
    out = torch.zeros_like(x)
    for n in range(len(x)):
        for e, s in zip(which[n].tolist(), share[n].tolist(), strict=True):
            gate, up = (w["experts.gate_up.w"][e] @ x[n]).chunk(2)
            out[n] += s * (w["experts.down.w"][e] @ (F.silu(gate) * up))
    return out


def draw(tokens: int, seed: int, experts: int = X) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, E, generator=generator)
    share, which = torch.rand(tokens, experts, generator=generator).topk(K, -1)
    return x, which, share


@pytest.mark.parametrize("form", [experts.experts, experts.gathered_experts, experts.blocked_experts, experts.grouped_experts])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 31, 32, 33, 100])
def test_forms_agree(form, tokens: int) -> None:
    w = weights()
    x, which, share = draw(tokens, tokens)
    assert (form(w, x, which, share, F.silu) - by_hand(w, x, which, share)).abs().max() < 1e-5


@pytest.mark.parametrize("form", [experts.gathered_experts, experts.blocked_experts, experts.grouped_experts])
@pytest.mark.parametrize("tokens", [3, 64])
def test_experts_nobody_chose_are_not_computed(form, tokens: int) -> None:
    """Weights of experts 3 and 4 are NaN: computing them and multiplying by zero would show."""
    w = weights()
    x, which, share = draw(tokens, 1, experts=2)
    want = by_hand(w, x, which, share)
    for t in w.values():
        t[3:] = float("nan")
    assert (form(w, x, which, share, F.silu) - want).abs().max() < 1e-5


def test_skewed_choices_fill_blocks_unevenly() -> None:
    w = weights()
    x, _, share = draw(200, 2)
    which = torch.tensor([[0, 4]]).repeat(200, 1)
    which[0] = torch.tensor([2, 1])
    assert (experts.blocked_experts(w, x, which, share, F.silu) - by_hand(w, x, which, share)).abs().max() < 1e-5


def test_capacity_drops_the_last_of_a_row() -> None:
    """By hand: 4 tokens, 2 experts, 1 chosen, factor 1 -> 2 places an expert; row 0 chooses expert 0 three times."""
    which = torch.tensor([[[0], [0], [1], [0]], [[1], [1], [1], [1]]])
    assert feedforward.within_capacity(which, 2, 1.0)[..., 0].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert feedforward.within_capacity(which, 2, 0.5)[..., 0].tolist() == [[1, 0, 1, 0], [1, 0, 0, 0]]
    assert feedforward.within_capacity(which, 2, 9.0).all()


def test_capacity_in_a_model(tmp_path) -> None:
    """None and a large factor drop nothing; a small one changes prefill and leaves single tokens alone."""
    from rayneuron import models
    from rayneuron.models import hub
    from rayneuron.models.collectives import Solo
    from tests.models import cases
    from tests.models.cases import Runner

    saved = cases.save(cases.CONFIGS["mixtral"](), tmp_path, tokens=16)
    config = hub.read_config(tmp_path)

    def run(factor: float | None) -> Tensor:
        arch = models.check(config, tp=1, max_model_len=64, capacity_factor=factor)
        with torch.no_grad():
            return Runner.open(tmp_path, Solo(), arch=arch).chunk(saved.ids, 0, 16, 16, 32)

    assert (run(None) - saved.logits).abs().max() < 1e-4 and (run(4.0) - saved.logits).abs().max() < 1e-4
    dropped = run(0.25)
    assert (dropped - saved.logits).abs().max() > 1e-2 and (dropped[:, 0] - saved.logits[:, 0]).abs().max() < 1e-4
