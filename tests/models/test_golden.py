"""Every family equals transformers, at every degree, through saved files."""

from __future__ import annotations

import pytest

from tests.models import cases
from tests.models.cases import Runner, Saved

TOLERANCE = 1e-4  # absolute, on logits of order 1


@pytest.fixture(scope="module", params=list(cases.CONFIGS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return cases.save(cases.CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_transformers(saved: Saved, ranks: int) -> None:
    """Prefill at a bucket's edges (15, 16, 17), single tokens, three at once; every rank returns the same."""

    def work(comm):
        runner = Runner.open(saved.path, comm)
        return [cases.run(runner, saved.ids, prompt) for prompt in (15, 16, 17)]

    everybody = cases.on_ranks(ranks, work)
    for prompts in everybody:
        for got in prompts:
            assert (got - saved.logits).abs().max() < TOLERANCE
    assert saved.logits.abs().max() > 0.3
