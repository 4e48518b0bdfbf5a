"""generate(num_beams) of the HF adapter is transformers' own, on random checkpoints."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from rayneuron import LLM
from rayneuron.errors import RequestError
from rayneuron.hf import HuggingFaceGenerationAdapter
from tests.models import cases

SAID = [
    {"num_beams": 3, "early_stopping": early, "length_penalty": penalty}
    for early, penalty in [(False, 1.0), (True, 1.0), ("never", 1.0), (True, -1.5), (False, 3.0), ("never", 3.0), (False, -1.5)]
] + [{"num_beams": 4, "min_new_tokens": 5, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, {"num_beams": 8}]
ENDS = list(range(12))  # many, so that beams do end


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(12, cases.VOCAB, (n,), generator=draw).tolist() for n in (3, 16, 17, 40)]


def compare(folder, said, **options) -> set[int]:
    """The lengths of what was found, which is the same."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    lengths = set()
    base = {"dtype": "fp32", "max_model_len": 64, "max_num_seqs": 8, "threads": 1, "skip_tokenizer_init": True, "block_size": 16}
    options = {**base, **options}
    with LLM(folder, **options) as llm:
        adapter = HuggingFaceGenerationAdapter(llm)
        for each in said:
            for ids in prompts():
                asked = {"max_new_tokens": 12, "num_return_sequences": 3, "eos_token_id": ENDS, "pad_token_id": 0, "do_sample": False}
                rows = torch.tensor([ids])
                theirs = model.generate(rows, attention_mask=torch.ones_like(rows), **asked, **each)
                ours = adapter.generate(rows, attention_mask=torch.ones_like(rows), **asked, **each)
                assert ours.tolist() == theirs.tolist(), each
                lengths.add(ours.shape[1] - len(ids))
    return lengths


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_beams_equal_transformers(name, tmp_path):
    saved = cases.save(cases.CONFIGS[name](), tmp_path, tokens=4)
    assert len(compare(saved.path, SAID, enable_prefix_caching=True)) > 1


@pytest.mark.slow
def test_beams_of_two_ranks_equal_transformers(tmp_path):
    saved = cases.save(cases.CONFIGS["llama"](), tmp_path, tokens=4)
    compare(saved.path, SAID[:3], tensor_parallel=2)


def test_what_beams_cannot_have_is_refused_by_name(tmp_path):
    saved = cases.save(cases.CONFIGS["llama"](), tmp_path, tokens=4)
    ids = torch.tensor([[20, 30, 40]])
    with LLM(saved.path, dtype="fp32", max_model_len=64, max_num_seqs=4, threads=1, skip_tokenizer_init=True) as llm:
        adapter = HuggingFaceGenerationAdapter(llm)
        for said, name in (
            ({"num_beams": 5}, "beams"),
            ({"num_beams": 3, "num_return_sequences": 4}, "n"),
            ({"num_beams": 3, "do_sample": True}, "num_beams"),
            ({"num_beams": 3, "stopping_criteria": [lambda ids, scores: True]}, "stopping_criteria"),
            ({"num_beams": 3, "length_penalty": 99.0}, "length_penalty"),
        ):
            with pytest.raises(RequestError) as wrong:
                adapter.generate(ids, max_new_tokens=4, **said)
            assert wrong.value.param == name
