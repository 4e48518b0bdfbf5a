"""The kernels as tests have them, which are skipped where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import pytest
import torch

from rayneuron.devices.cpu import library, ops
from rayneuron.models import ops as plain

Found = TypeVar("Found")


def here(found: Found | None) -> Found:
    """What there is; else the test is skipped."""
    if found is None:
        pytest.skip("no compiler, or a processor without AVX2")
    return found


def opened(march: str | None) -> Iterator[ops.Kernels]:
    """A team of two for an instruction set, which ends with the fixture."""
    made = ops.Kernels(here(library.library(march)), 2, plain.PLAIN)
    yield made
    made.close()


def team(dtype: torch.dtype) -> ops.Kernels:
    """A team of two for a dtype; whoever asks ends it."""
    return here(ops.kernels(2, dtype, plain.PLAIN))


def check_rows(kernels: ops.Kernels, made: dict, x: torch.Tensor, counts: tuple[int, ...]) -> None:
    """A row of x has the same bits of a product alone and among so many others, wherever it is."""
    n = len(x)
    alone = torch.cat([kernels.linear(made, "a", x[i : i + 1]) for i in range(n)])
    for rows in counts:
        for start in {0, 1, n - rows}:
            part = slice(start, min(start + rows, n))
            assert torch.equal(kernels.linear(made, "a", x[part]), alone[part]), (rows, start)
