"""typical_p, logprob_token_ids, top_n_tokens and truncation through the whole server, on every route, against transformers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from rayneuron.engine.sampling import uniforms
from tests.serve.real import Server, serving

PROMPT = list(range(20, 41))
IDS = [7, 300, 5, 499]
WARM = {"temperature": 1.3, "top_k": 60, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.6}


@pytest.fixture
async def server(tiny: Path) -> AsyncIterator[Server]:
    model = {"path": str(tiny), "name": "tiny", "chat_template": "{{ messages[0].content }}"}
    async with serving(tiny, max_model_len=128, model=model) as made:
        yield made


@cache
def reference(path: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)


def scores(path: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits [N, V] from which each of the output tokens was chosen."""
    with torch.inference_mode():
        return reference(path)(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]


def warped(logits: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """Probabilities [N, V] by transformers' warpers in transformers' order."""
    made: dict[str, Any] = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    made |= {"min_p": MinPLogitsWarper, "typical_p": TypicalLogitsWarper}
    for name, warper in made.items():
        logits = warper(how[name])(None, logits) if name in how else logits
    return logits.double().softmax(-1)


async def ask(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, reply = await server.post(path, json.dumps(body).encode())
    read = json.loads(reply)
    assert status == 200, read
    return read[0] if isinstance(read, list) else read


@pytest.mark.parametrize("how", [WARM, {"temperature": 1.0, "typical_p": 0.2}, {"temperature": 2.0, "top_p": 0.9, "typical_p": 0.9}])
async def test_typical_tokens_are_those_of_transformers(server: Server, tiny: Path, how: dict[str, Any]) -> None:
    """The very token at which transformers' distribution, summed in order of ids, passes the position's own number."""
    for seed in range(4):
        body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "seed": seed, "return_token_ids": True, **how}
        ids = (await ask(server, "/v1/completions", body))["choices"][0]["token_ids"]
        reached = warped(scores(tiny, PROMPT, ids), how).cumsum(-1)
        numbers = uniforms([seed] * 12, range(len(PROMPT), len(PROMPT) + 12))
        assert ids == [int((row <= float(u) * row[-1]).sum()) for row, u in zip(reached, numbers, strict=True)]
    plain = await ask(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0})
    greedy = await ask(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "typical_p": 0.2})
    assert plain["choices"][0]["text"] == greedy["choices"][0]["text"]
    await server.settle()


async def test_probabilities_of_ids_that_were_asked_for(server: Server, tiny: Path) -> None:
    """In the order asked, of unedited logits, whatever edits the choice; chat and completions."""
    body = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True, "seed": 3, "return_token_ids": True, "return_tokens_as_token_ids": True}
    body |= {"logprobs": 1, "logprob_token_ids": [*IDS, IDS[0]], "logit_bias": {"7": -100}, **WARM}
    choice = (await ask(server, "/v1/completions", body))["choices"][0]
    wanted = scores(tiny, PROMPT, choice["token_ids"]).double().log_softmax(-1)
    for row, token, table in zip(wanted, choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True):
        assert list(table) == list(dict.fromkeys([f"token_id:{token}", *(f"token_id:{i}" for i in IDS)]))
        assert table == {name: pytest.approx(row[int(name[9:])].item(), abs=2e-4) for name in table}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "logprobs": True, "logprob_token_ids": IDS}
    chat |= {"return_tokens_as_token_ids": True, "return_token_ids": True, "temperature": 0}
    told = await ask(server, "/v1/chat/completions", chat)
    for item in told["choices"][0]["logprobs"]["content"]:
        assert [top["token"] for top in item["top_logprobs"]] == [f"token_id:{i}" for i in IDS]
    values = [[top["logprob"] for top in item["top_logprobs"]] for item in told["choices"][0]["logprobs"]["content"]]
    rows = scores(tiny, told["prompt_token_ids"], told["choices"][0]["token_ids"]).double().log_softmax(-1)
    assert torch.allclose(torch.tensor(values, dtype=torch.float64), rows[:, IDS], atol=2e-4)
    await server.settle()


async def test_tgi_and_lmi_have_them_by_their_names(server: Server, tiny: Path) -> None:
    """typical_p, top_n_tokens and truncate of both; LMI takes vLLM's names too."""
    how = {"do_sample": True, "seed": 5, "typical_p": 0.4, "temperature": 1.2, "details": True, "decoder_input_details": True}
    how |= {"max_new_tokens": 8, "top_n_tokens": 3, "truncate": 6}
    inputs = "one two three four five six seven eight"
    for path, logprob in (("/generate", "logprob"), ("/invocations", "log_prob")):
        details = (await ask(server, path, {"inputs": inputs, "parameters": how}))["details"]
        prompt, ids = ([token["id"] for token in details[name]] for name in ("prefill", "tokens"))
        assert len(prompt) == 6
        logits = scores(tiny, prompt, ids)
        kept = warped(logits, {"temperature": 1.2, "typical_p": 0.4})
        assert all(row[token] > 0 for row, token in zip(kept, ids, strict=True))
        best = logits.double().log_softmax(-1).topk(3)
        assert [[top["id"] for top in row] for row in details["top_tokens"]] == best.indices.tolist()
        shown = torch.tensor([[top[logprob] for top in row] for row in details["top_tokens"]], dtype=torch.float64)
        assert torch.allclose(shown, best.values, atol=2e-4)
    body = {"inputs": inputs, "parameters": {"details": True, "max_new_tokens": 4, "logprob_token_ids": IDS}}
    details = (await ask(server, "/invocations", body))["details"]
    assert [[top["id"] for top in row] for row in details["top_tokens"]] == [IDS] * len(details["tokens"])
    await server.settle()


async def test_every_route_truncates(server: Server) -> None:
    """Prompt tokens as usage tells them."""
    long = "word " * 40
    chat = [{"role": "user", "content": long}]
    for path, body, name in (
        ("/v1/completions", {"prompt": long}, "prompt_tokens"),
        ("/v1/chat/completions", {"messages": chat}, "prompt_tokens"),
        ("/v1/messages", {"messages": chat}, "input_tokens"),
        ("/v1/responses", {"input": long}, "input_tokens"),
        ("/generate", {"prompt": long}, "prompt_tokens"),
        ("/v1/embeddings", {"input": long}, "prompt_tokens"),
    ):
        most = {} if "embeddings" in path else {"max_output_tokens": 2} if "responses" in path else {"max_tokens": 2}
        told = await ask(server, path, {**body, **most, "truncate_prompt_tokens": 9})
        assert told["usage"][name] == 9, path
    status, reply = await server.post("/v1/responses", json.dumps({"input": long * 9, "max_output_tokens": 2}).encode())
    assert status == 400
    cut = await ask(server, "/v1/responses", {"input": long * 9, "max_output_tokens": 2, "truncation": "auto"})
    assert cut["usage"]["input_tokens"] == 126
    await server.settle()


async def test_what_is_wrong_is_named(server: Server) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "typical_p": 0}, "typical_p"),
        ("/v1/completions", {"prompt": "a", "typical_p": 1.1}, "typical_p"),
        ("/v1/completions", {"prompt": "a", "logprob_token_ids": IDS}, "logprob_token_ids"),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "logprob_token_ids": [512]}, "logprob_token_ids"),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "logprob_token_ids": [*range(129)]}, "logprob_token_ids"),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "logprob_token_ids": IDS, "echo": True}, "logprob_token_ids"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprob_token_ids": IDS}, "logprob_token_ids"),
    ):
        status, reply = await server.post(path, json.dumps(body).encode())
        assert (status, json.loads(reply)["error"]["param"]) == (400, param), reply
    status, reply = await server.post("/generate", json.dumps({"inputs": "a", "parameters": {"typical_p": 2}}).encode())
    assert status == 422 and json.loads(reply)["error"].startswith("parameters.typical_p must be between 0 and 1")
    await server.settle()


async def test_the_best_of_several_are_those_of_all(server: Server) -> None:
    body = {"prompt": [PROMPT, PROMPT[:5]], "max_tokens": 9, "seed": 3, "temperature": 1.0}
    every = await ask(server, "/v1/completions", {**body, "n": 5, "logprobs": 0})
    best = await ask(server, "/v1/completions", {**body, "n": 2, "best_of": 5})

    def likely(choice: dict[str, Any]) -> float:
        told = choice["logprobs"]["token_logprobs"]
        return sum(told) / len(told)

    ranked = [sorted(every["choices"][at : at + 5], key=likely, reverse=True) for at in (0, 5)]
    assert [c["text"] for c in best["choices"]] == [c["text"] for group in ranked for c in group[:2]]
    assert [c["index"] for c in best["choices"]] == [0, 1, 2, 3] and {c["logprobs"] for c in best["choices"]} == {None}
    assert best["usage"] == every["usage"]
    await server.settle()


@pytest.mark.parametrize("path", ["/generate", "/invocations"])
async def test_details_list_the_others(server: Server, path: str) -> None:
    given = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 6, "seed": 4, "details": True}
    body = {"prompt": "go on", "max_tokens": 6, "seed": 4, "temperature": 1.0}
    texts = [c["text"] for c in (await ask(server, "/v1/completions", {**body, "n": 3, "best_of": 3}))["choices"]]
    told = await ask(server, path, {"inputs": "go on", "parameters": {**given, "best_of": 3}})
    others = told["details"]["best_of_sequences"]
    assert sorted([told["generated_text"], *(each["generated_text"] for each in others)]) == sorted(texts) and len(others) == 2
    means = [sum(t.get("logprob", t.get("log_prob")) for t in each["tokens"]) / len(each["tokens"]) for each in (told["details"], *others)]
    assert means == sorted(means, reverse=True)
    one = await ask(server, path, {"inputs": "go on", "parameters": given})
    assert "best_of_sequences" not in one["details"]
    await server.settle()


async def test_beams_on_every_route_that_searches(server: Server, tiny: Path) -> None:
    rows = torch.tensor([PROMPT])
    said = {"num_beams": 3, "length_penalty": 0.5, "max_new_tokens": 8, "num_return_sequences": 2, "do_sample": False, "pad_token_id": 0}
    ends = reference(tiny).generation_config.eos_token_id
    theirs = reference(tiny).generate(rows, attention_mask=torch.ones_like(rows), eos_token_id=ends, **said)[:, len(PROMPT) :].tolist()
    body = {"prompt": PROMPT, "num_beams": 3, "length_penalty": 0.5, "max_tokens": 8, "n": 2, "return_token_ids": True}
    ours = [c["token_ids"] for c in (await ask(server, "/v1/completions", body))["choices"]]
    assert ours == theirs
    chat = {"messages": [{"role": "user", "content": "go on"}], "num_beams": 3, "max_tokens": 8}
    whole = {"prompt": "go on", "num_beams": 3, "max_tokens": 8}
    text = (await ask(server, "/v1/completions", whole))["choices"][0]["text"]
    assert (await ask(server, "/v1/chat/completions", chat))["choices"][0]["message"]["content"] == text
    lmi = {"inputs": "go on", "parameters": {"num_beams": 3, "max_new_tokens": 8}}
    assert (await ask(server, "/invocations", lmi))["generated_text"] == text
    await server.settle()
