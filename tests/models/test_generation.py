"""Families of which no demo model exists: greedy ids through the whole engine equal transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

from rayneuron import LLM
from tests.models import cases

QUICK = ("gemma3_text", "gpt_oss")
OTHERS = ("qwen2_moe", "phi3_long", "gemma2", "granite", "olmo2", "starcoder2", "stablelm", "falcon", "falcon_new")
NEW = 12


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_greedy_equals_transformers(name: str, tmp_path: Path) -> None:
    """Four prompts at once in chunks: shorter and longer than a window, one a bucket's edge."""
    saved = cases.save(cases.CONFIGS[name](), tmp_path, tokens=4)
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, cases.VOCAB, (n,), generator=draw).tolist() for n in (3, 16, 17, 40)]
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    theirs = [model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist() for ids in prompts]
    options = {"dtype": "fp32", "max_model_len": 64, "max_num_seqs": 3, "threads": 1, "skip_tokenizer_init": True}
    with LLM(saved.path, **options) as llm:
        outputs = llm.generate(prompts, {"temperature": 0, "max_tokens": NEW, "ignore_eos": True})
    assert [list(o.outputs[0].token_ids) for o in outputs] == theirs
    assert len({token for ids in theirs for token in ids}) > 3
