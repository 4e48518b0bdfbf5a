"""Bucket lists and selection against NxD Inference's rules as tables, and our padding."""

from __future__ import annotations

import ast
import math
import os
import re
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.engine.buckets import powers, prefixes
from rayneuron.errors import CompileError
from rayneuron.policies import prefix_buckets as nxd

NXDI = os.environ.get("RAYNEURON_NXDI")
PREFIX = [(t, p) for t in (512, 1024, 2048) for p in (0, *prefixes("auto", 2048))]


def test_lists() -> None:
    assert prefixes(None, 1024) == () and prefixes([64, 100], 1024) == (64, 100)
    assert prefixes("auto", 1000) == (512, 1000) and prefixes("auto", 2048) == (512, 1024, 2048)


@pytest.mark.parametrize(
    ("new", "cached", "expected"),
    [
        (100, 200, (512, 0)),  # 300 in all: computed whole
        (1, 256, (512, 0)),  # 257, the least of that rule
        (12, 500, (512, 0)),  # 512, the most
        (100, 100, (512, 0)),  # 412 places are free: the whole prefix moves
        (100, 1000, (512, 1024)),  # 588 stay, in the bucket of 1024
        (100, 900, (512, 512)),  # 488 stay
        (512, 512, (512, 512)),  # nothing is free
        (600, 600, (1024, 512)),
        (2000, 0, (2048, 0)),
    ],
)
def test_select_prefix(new: int, cached: int, expected: tuple[int, int]) -> None:
    assert nxd.select_prefix(PREFIX, new, cached) == expected


@given(st.integers(1, 2048), st.integers(0, 2048))
def test_a_prefix_is_never_lost(new: int, cached: int) -> None:
    """Every token is in one of the two dimensions."""
    fit = nxd.select_prefix(PREFIX, new, cached)
    assert (fit.prefill, fit.prefix) in PREFIX
    assert new <= fit.prefill and new + cached <= fit.prefill + fit.prefix


def test_select_prefix_beyond() -> None:
    with pytest.raises(CompileError, match="2049 new tokens"):
        nxd.select_prefix(PREFIX, 2049, 0)
    with pytest.raises(CompileError, match="prefix of 2100"):
        nxd.select_prefix(PREFIX, 512, 2100)


@pytest.mark.skipif(NXDI is None, reason="RAYNEURON_NXDI names no neuronx-distributed-inference source")
def test_lists_against_the_real_source() -> None:
    """The generating functions of the real file, executed alone."""
    source = (Path(NXDI or "") / "neuronx_distributed_inference" / "modules" / "autobucketing.py").read_text()
    names = ("generate_buckets", "generate_2d_buckets_for_prefix_caching")
    picked = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name in names]
    code = "from math import *\nimport math\n" + re.sub(r"-> .*:\n", ":\n", "\n".join(ast.unparse(n) for n in picked))
    real: dict[str, object] = {"log2": math.log2, "List": list, "Any": object}
    exec(code, real)  # noqa: S102
    for low in (1, 128, 256, 512):
        for high in (*range(low, 700, 37), 1000, 1024, 1448, 1449, 2048, 4096, 32768):
            assert powers(low, high) == real["generate_buckets"](low, high), (low, high)
    for longest in (512, 1000, 2048, 5000):
        two = real["generate_2d_buckets_for_prefix_caching"](512, longest, 512, longest, True)
        auto = prefixes("auto", longest)
        assert [(t, p) for t in auto for p in (0, *auto)] == [tuple(b) for b in two]


@pytest.mark.skipif(NXDI is None, reason="RAYNEURON_NXDI names no neuronx-distributed-inference source")
def test_selection_against_the_real_source() -> None:
    """The real methods, executed alone, over a grid."""
    import torch

    source = (Path(NXDI or "") / "neuronx_distributed_inference" / "models" / "model_wrapper.py").read_text()
    names = ("get_target_2d_bucket_for_prefix_caching",)
    picked = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name in names]
    real: dict[str, object] = {"torch": torch, "FUSED_SPECULATION_MODEL_TAG": "f", "CONTEXT_ENCODING_MODEL_TAG": "c"}
    exec("\n".join(ast.unparse(n) for n in picked), real)  # noqa: S102

    config = types.SimpleNamespace(
        buckets=[list(b) for b in PREFIX], allow_input_truncation=False, enable_fused_speculation=False, enable_eagle_speculation=False,
        pa_block_size=0, speculation_length=0,
    )  # fmt: skip
    owner = types.SimpleNamespace(neuron_config=config, tag="c", async_mode=False)
    for new in (1, 100, 256, 480, 512, 700, 1500):
        for cached in (0, 1, 100, 256, 300, 511, 700, 1000, 2048):
            args = [None] * 13 + [torch.tensor([[new]]), torch.tensor([[cached]])]
            theirs = real["get_target_2d_bucket_for_prefix_caching"](owner, *args)
            assert nxd.select_prefix(PREFIX, new, cached) == tuple(theirs.tolist()), (new, cached)
