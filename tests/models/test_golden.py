"""Every family equals transformers, at every degree, through saved files."""

from __future__ import annotations

import pytest
import torch

from rayneuron.models.collectives import Solo
from tests.models import cases
from tests.models.cases import Runner, Saved

TOLERANCE = 2e-6  # absolute, on logits of order 1


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return cases.save(cases.CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))


SIZES = [
    pytest.param(name, ranks, marks=pytest.mark.slow if name in cases.LATER and ranks != 2 else ())
    for name in cases.CONFIGS
    for ranks in (1, 2, 4)
]


@pytest.mark.parametrize(("saved", "ranks"), SIZES, indirect=["saved"])
def test_equals_transformers(saved: Saved, ranks: int) -> None:
    """Prefill at a bucket's edges (15, 16, 17), single tokens, three at once; every rank returns the same."""

    def work(comm):
        runner = Runner.open(saved.path, comm)
        return [cases.run(runner, saved.ids, prompt) for prompt in (15, 16, 17)]

    everybody = cases.on_ranks(ranks, work)
    for prompts in everybody:
        for got in prompts:
            assert (got - saved.logits).abs().max() <= TOLERANCE
    assert saved.logits.abs().max() > 0.3


@pytest.mark.parametrize("saved", cases.PARAMS, indirect=True)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_smaller_dtypes_stay_within_their_bounds(saved: Saved, dtype: torch.dtype, bound: float) -> None:
    """Largest change of a logit over the largest logit, against transformers in float32: bf16 has 8 bits of mantissa, fp16 has 11.

    A mixture's router may choose another expert for a token, so of those the median token counts.
    """
    got = cases.on_ranks(2, lambda comm: cases.run(Runner.open(saved.path, comm, dtype=dtype), saved.ids, 16))[0]
    change = (got - saved.logits).abs().amax(-1) / saved.logits.abs().max()
    mixture = "experts.down.w" in Runner.open(saved.path, Solo()).weights["layers"][-1]
    assert 0 < (change.median() if mixture else change.max()) < bound
