"""generate(output_scores, output_logits) of the HF adapter gives what transformers' own gives, on random checkpoints."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from rayneuron import LLM
from rayneuron.errors import RequestError
from rayneuron.hf import HuggingFaceGenerationAdapter
from tests.models import cases

OPTIONS = {"dtype": "fp32", "max_model_len": 64, "max_num_seqs": 8, "threads": 1, "skip_tokenizer_init": True, "block_size": 16}
GREEDY = [
    {},
    {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    {"min_new_tokens": 6, "eos_token_id": list(range(40)), "suppress_tokens": [20, 30]},
    {"bad_words_ids": [[40], [41, 42]], "min_length": 20},
]
SAMPLED = [
    {"top_k": 0},
    {"temperature": 0.7, "top_k": 20},
    {"top_k": 0, "top_p": 0.6, "repetition_penalty": 1.3},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 0, "typical_p": 0.4},
    {"top_k": 30, "top_p": 0.8, "typical_p": 0.9, "min_new_tokens": 3, "eos_token_id": [5, 6]},
]
ASKED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 8}
ASKED |= {"pad_token_id": 0, "eos_token_id": [2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cases.save(cases.CONFIGS["llama"](), tmp_path_factory.mktemp("llama"), tokens=4).path


@pytest.fixture(scope="module")
def theirs(folder):
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def rows(seed: int) -> torch.Tensor:
    return torch.randint(12, cases.VOCAB, (3, 16), generator=torch.Generator().manual_seed(seed))


def alike(ours: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...], ends: list[int]) -> None:
    """Every row of every step until it has ended."""
    assert len(ours) == len(others)
    for step, (mine, other) in enumerate(zip(ours, others, strict=True)):
        for row, end in enumerate(ends):
            if step < end:
                assert torch.equal(mine[row].isneginf(), other[row].isneginf()), (step, row)
                torch.testing.assert_close(mine[row], other[row], atol=2e-4, rtol=2e-4)
            else:
                assert mine[row].isfinite().nonzero().flatten().tolist() == [0]  # the pad token


def ends_of(sequences: torch.Tensor, width: int, eos: list[int]) -> list[int]:
    return [next((i + 1 for i, token in enumerate(row[width:].tolist()) if token in eos), sequences.shape[1] - width) for row in sequences]


@pytest.mark.parametrize("drafts", [False, {"prompt_lookup_min": 1, "adaptive": False}])
def test_greedy_scores_and_logits_are_transformers(folder, theirs, drafts):
    with LLM(folder, **OPTIONS, speculative_config=drafts) as llm:
        adapter = HuggingFaceGenerationAdapter(llm)
        early = 0
        for said in GREEDY:
            ids = rows(len(said))
            asked = {**ASKED, "attention_mask": torch.ones_like(ids), "do_sample": False, **said}
            a, b = theirs.generate(ids, **asked), adapter.generate(ids, **asked)
            assert b.sequences.tolist() == a.sequences.tolist() == b["sequences"].tolist()
            ends = ends_of(b.sequences, ids.shape[1], said.get("eos_token_id", [2]))
            early += min(ends) < len(b.scores)
            alike(b.scores, a.scores, ends)
            alike(b.logits, a.logits, ends)
        assert early
        assert not llm.engine.host.kept._rows


@pytest.mark.parametrize("said", SAMPLED, ids=[" ".join(said) for said in SAMPLED])
def test_sampled_scores_are_what_transformers_would_draw_from(folder, theirs, said):
    """Of the same ids, fed to transformers' processors one by one."""
    with LLM(folder, **OPTIONS) as llm:
        ids = rows(9)
        asked = {**ASKED, "output_logits": False, "do_sample": True, "num_return_sequences": 2, **said}
        out = HuggingFaceGenerationAdapter(llm).generate(ids, attention_mask=torch.ones_like(ids), seed=3, **asked)
    assert out.logits is None and len(out.scores) == out.sequences.shape[1] - 16
    config = tf.GenerationConfig(do_sample=True, pad_token_id=0, max_new_tokens=8, **{"eos_token_id": [2], **said})
    theirs._prepare_special_tokens(config, False, device="cpu")
    processors = theirs._get_logits_processor(config, 16, ids, None, [], device="cpu")
    ends = ends_of(out.sequences, 16, said.get("eos_token_id", [2]))
    with torch.inference_mode():
        raw = theirs(out.sequences).logits
    for step, scores in enumerate(out.scores):
        expected = processors(out.sequences[:, : 16 + step], raw[:, 15 + step].clone())
        for row, end in enumerate(ends):
            if step < end:
                assert torch.equal(scores[row].isneginf(), expected[row].isneginf())
                torch.testing.assert_close(scores[row], expected[row], atol=3e-4, rtol=3e-4)
                assert scores[row][out.sequences[row, 16 + step]].isfinite()


def test_what_is_returned_and_what_is_refused(folder):
    ids = torch.tensor([[20, 30, 40]])
    with LLM(folder, **OPTIONS) as llm:
        adapter = HuggingFaceGenerationAdapter(llm)
        plain = adapter.generate(ids, max_new_tokens=4, do_sample=False, output_scores=True)  # as transformers: nowhere to put them
        assert isinstance(plain, torch.Tensor)
        told = adapter.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        assert told.sequences.tolist() == plain.tolist() and told.scores is None and list(told) == ["sequences"]
        stopped = adapter.generate(ids, stopping_criteria=[lambda so_far, scores: so_far.shape[1] >= 5], **ASKED, do_sample=False)
        assert len(stopped.scores) == len(stopped.logits) == stopped.sequences.shape[1] - 3 == 2
        with pytest.raises(AttributeError):
            _ = told.attentions
        for said, name in (({"num_beams": 2}, "output_scores"), ({"output_attentions": True}, "output_attentions")):
            with pytest.raises(RequestError) as wrong:
                adapter.generate(ids, **{**ASKED, **said})
            assert wrong.value.param == name
