"""Ranks as real processes over gloo equal transformers; the collectives' verbs by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models import cases
from tests.models.cases import Saved

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("llama", "mixtral", "gpt2", "bloom")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    found = [cases.save(cases.CONFIGS[name](), tmp_path_factory.mktemp(name)) for name in FAMILIES]
    for saved in found:
        torch.save(saved.ids, saved.path / "ids.pt")
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_processes_equal_transformers(models: list[Saved], ranks: int, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/meeting"
    command = [sys.executable, "-m", "tests.models.rank", address, str(ranks), str(tmp_path), *(str(saved.path) for saved in models)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    for saved in models:
        for everybody in found:
            assert (everybody[str(saved.path)] - saved.logits).abs().max() < 1e-4
            assert torch.equal(everybody[str(saved.path)], found[0][str(saved.path)])
    check_verbs([f["verbs"] for f in found])


def check_verbs(found: list[dict[str, torch.Tensor]]) -> None:
    n = len(found)
    base = torch.arange(n * 6, dtype=torch.float32).view(2, n * 3)
    total = base * n + 100 * sum(range(n))
    for rank, verbs in enumerate(found):
        assert torch.equal(verbs["reduce"], total)
        assert torch.equal(verbs["gather"], torch.cat([base + 100 * r for r in range(n)]))
        assert torch.equal(verbs["scatter"], total[:, rank * 3 : rank * 3 + 3])
        assert verbs["half"].dtype == torch.bfloat16 and verbs["half"].tolist() == [n * (n + 1) / 2] * 3
        assert verbs["ring"][:, 0].tolist() == [(rank - 1) % n] * 4 and not verbs["ring"][:, 1].any()
        assert verbs["broadcast"].tolist() == [[n - 1] * 2] * 4
