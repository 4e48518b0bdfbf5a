"""Vectors of prompts against transformers' hidden states: every length, beside streams, in chunks, preempted, cached, on several ranks."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from rayneuron import LLM, SamplingParams
from rayneuron.errors import RequestError
from rayneuron.types import Request
from tests.models.cases import CONFIGS, VOCAB, save

OPTIONS: dict[str, Any] = {"dtype": "fp32", "max_model_len": 128, "max_num_seqs": 4, "threads": 1, "skip_tokenizer_init": True}
NOTHING = SamplingParams(max_tokens=0, temperature=0.0)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save(CONFIGS["llama"](), path)
    return path


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCAB) for _ in range(n)] for n in lengths]


@cache
def reference(path: Path) -> Any:
    return AutoModel.from_pretrained(path, dtype=torch.float32).eval()


def hidden(path: Path, ids: list[int]) -> torch.Tensor:
    """transformers' states [T,E] behind the final norm."""
    with torch.inference_mode():
        states: torch.Tensor = reference(path)(torch.tensor([ids])).last_hidden_state[0]
    return states


def pooled(llm: LLM, asked: list[list[int]], kind: str, *beside: Request) -> tuple[list[torch.Tensor], dict[str, list[int]]]:
    """The vectors, and the ids of what ran beside them."""
    requests = [Request(id=str(i), prompt_ids=ids, params=NOTHING, pooling=kind) for i, ids in enumerate(asked)]  # type: ignore[arg-type]
    vectors, texts = {}, {request.id: [] for request in beside}
    for delta in llm.tokens([*beside, *requests]):
        if delta.pooled:
            assert delta.finish_reason == "stop" and not delta.token_ids
            vectors[delta.request_id] = torch.from_numpy(np.frombuffer(delta.pooled, np.float32).copy())
        else:
            texts[delta.request_id] += delta.token_ids
    llm.engine.check_ledger()
    return [vectors[request.id] for request in requests], texts


def check(path: Path, asked: list[list[int]], got: list[torch.Tensor], kind: str) -> None:
    for ids, vector in zip(asked, got, strict=True):
        states = hidden(path, ids)
        torch.testing.assert_close(vector, states[-1] if kind == "last" else states.mean(0), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["opt", "gpt2", "gemma3_text", "mixtral"])
def test_every_family(tmp_path: Path, family: str) -> None:
    save(CONFIGS[family](), tmp_path)
    asked = prompts(1, 2, 31, 70)
    with LLM(tmp_path, **OPTIONS) as llm:
        for kind in ("last", "mean"):
            check(tmp_path, asked, pooled(llm, asked, kind)[0], kind)


@pytest.mark.parametrize(
    "more",
    [
        {"prefill_chunk_tokens": 32},
        {"kv_cache_tokens": 192, "block_size": 16},  # who decodes beside is preempted, and so are they
        {"enable_prefix_caching": False},
        pytest.param({"tensor_parallel": 2}, marks=pytest.mark.slow),
        {"pipeline_parallel": 2},
        {"tensor_parallel": 2, "sequence_parallel": True},
        {"compile": {"async_mode": True}},
    ],
)
def test_beside_streams_which_do_not_notice(folder: Path, more: dict[str, Any]) -> None:
    asked = prompts(1, 16, 17, 64, 65, 100, 128, 3, 3)
    beside = [Request(id=f"text {i}", prompt_ids=ids, params=GREEDY) for i, ids in enumerate(prompts(5, 40, seed=1))]
    with LLM(folder, **OPTIONS) as llm:
        alone = {request.id: llm.generate([request.prompt_ids], GREEDY)[0].outputs[0].token_ids for request in beside}
    with LLM(folder, **OPTIONS, **more) as llm:
        for kind in ("last", "mean"):
            got, texts = pooled(llm, asked, kind, *beside)
            assert texts == alone
            check(folder, asked, got, kind)


def test_a_known_prefix_is_used_where_only_the_last_state_is_wanted(folder: Path) -> None:
    start = prompts(64)[0]
    asked = [[*start, *rest] for rest in prompts(20, 33, seed=2)] + [start]
    with LLM(folder, **OPTIONS, block_size=16) as llm:
        llm.generate([start], GREEDY)
        before = {kind: [] for kind in ("last", "mean")}
        for kind in before:
            requests = [Request(id=str(i), prompt_ids=ids, params=NOTHING, pooling=kind) for i, ids in enumerate(asked)]
            before[kind] = [delta.cached_tokens for delta in sorted(llm.tokens(requests), key=lambda d: d.request_id)]
            check(folder, asked, pooled(llm, asked, kind)[0], kind)
        assert before == {"last": [64, 64, 63], "mean": [0, 0, 0]}


def test_what_has_no_graphs_or_another_way_is_refused(folder: Path) -> None:
    with LLM(folder, **OPTIONS, buckets={"embeddings": False}) as llm, pytest.raises(RequestError, match="buckets.embeddings: true"):
        pooled(llm, prompts(3), "last")
    with LLM(folder, **OPTIONS) as llm, pytest.raises(RequestError, match="makes vectors by cls_token"):
        pooled(llm, prompts(3), "cls_token")


def test_files_of_sentence_transformers_say_how(folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    path = tmp_path / "model"
    shutil.copytree(folder, path)
    asked = prompts(9)
    with LLM(path, **OPTIONS) as llm:
        (last,) = llm.embed(asked)
    assert torch.tensor(last.outputs.embedding).norm().item() == pytest.approx(1)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}))
    (path / "modules.json").write_text(json.dumps([{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]))
    with LLM(path, **OPTIONS) as llm:
        (mean,) = llm.embed(asked)
        check(path, asked, [torch.tensor(mean.outputs.embedding)], "mean")
        (short,) = llm.embed(asked, dimensions=8)
        assert short.outputs.embedding == mean.outputs.embedding[:8]
        with pytest.raises(RequestError, match="dimensions must be at most 64, got 65"):
            llm.embed(asked, dimensions=65)
