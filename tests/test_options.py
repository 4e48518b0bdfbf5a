"""Deployment options that change how weights and KV are held, through the whole offline engine."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from rayneuron import LLM, loading
from rayneuron.config import parse
from rayneuron.errors import ConfigError
from rayneuron.models import presharded

PROMPT = {"prompt_token_ids": list(range(20, 60))}


def generate(path, **options) -> list[int]:
    with LLM(path, max_model_len=128, max_num_seqs=2, threads=1, **options) as llm:
        out = llm.generate(PROMPT, {"temperature": 0, "max_tokens": 8, "ignore_eos": True})[0].outputs[0]
        llm.engine.check_ledger()
    return out.token_ids


@pytest.fixture(scope="module")
def plain(tiny):
    return generate(tiny, dtype="fp32")


@pytest.mark.parametrize(
    "options",
    [
        {"fused_qkv": False},
        pytest.param({"tensor_parallel": 4, "shard_over_sequence": True}, marks=pytest.mark.slow),  # tests/group/test_group.py does it too
        {"tensor_parallel": 4, "group_query_attention": "replicated-heads"},
    ],
    ids=str,
)
def test_how_weights_are_cut_changes_no_token(tiny, plain, options):
    assert generate(tiny, dtype="fp32", **options) == plain


def test_weights_cut_ahead_of_time_load_and_change_no_token(tiny, plain, tmp_path):
    presharded.shard(tiny, 2, tmp_path / "two", dtype="fp32")
    assert generate(tmp_path / "two", dtype="fp32", tensor_parallel=2) == plain
    with pytest.raises(ConfigError, match="2"):
        generate(tmp_path / "two", dtype="fp32")


def test_auto_means_one_dtype_to_shard_and_to_run(tiny, tmp_path):
    """A checkpoint in fp16 is computed in bf16, so it is cut into bf16 too: the same word on both sides fits."""
    half = Path(shutil.copytree(tiny, tmp_path / "half"))
    said = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**said, "torch_dtype": "float16", "dtype": "float16"}))
    assert presharded.shard(half, 1, tmp_path / "one").dtype == "bf16"
    runnable, _ = loading.check(parse({"model": {"path": str(tmp_path / "one")}, "max_model_len": 64}))
    assert runnable.dtype == "bf16"


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "f8e4m3", "kv_dtype": "f8e4m3"}], ids=str)
def test_a_small_model_still_answers_in_eight_bits(smollm2, options):
    with LLM(smollm2, dtype="bf16", max_model_len=128, max_num_seqs=1, threads=1, buckets={"context_encoding": [16]}, **options) as llm:
        text = llm.generate("The capital of France is", {"temperature": 0, "max_tokens": 3})[0].outputs[0].text
    assert "Paris" in text


def test_memory_is_said_before_anything_is_read(tiny, caplog):
    with caplog.at_level(logging.INFO, logger="rayneuron"):
        generate(tiny, dtype="fp32")
    said = [r.getMessage() for r in caplog.records]
    estimate = next(i for i, line in enumerate(said) if "a rank will hold weights" in line)
    assert any("MiB of weights in" in line for line in said[estimate + 1 :])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantization": "int7"}, "int8"),
        ({"kv_dtype": "int8"}, "f8e4m3"),
        ({"group_query_attention": "shard-over-batch"}, "replicated-heads"),
        ({"capacity_factor": 2.0}, "mixture of experts"),
        ({"shard_over_sequence": True}, "leave it out"),
        ({"tensor_parallel": 64}, "attention heads"),
    ],
)
def test_options_that_cannot_be_are_refused_before_loading(tiny, options, says):
    with pytest.raises(ConfigError, match=says):
        LLM(tiny, max_model_len=128, **options)
