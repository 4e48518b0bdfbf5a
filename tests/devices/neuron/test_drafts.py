"""Drafts made within a step on Neuron, over the stand-in: one graph makes and verifies them, and they change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayneuron import LLM, SamplingParams, demo
from rayneuron.config import parse
from rayneuron.errors import ConfigError
from rayneuron.models import hub
from rayneuron.placement.fitting import Wanted, stage_memory
from rayneuron.placement.plan import read_draft, read_raw
from rayneuron.preflight import inspect
from tests.devices.neuron.test_device import OPTIONS, cores
from tests.models import published

ONE_ROW = {"max_num_seqs": 3, "buckets": {**OPTIONS["buckets"], "batch": [3]}}
BLOCKS = {"enable_prefix_caching": True, "block_size": 16}
WAYS: list[dict[str, Any]] = [
    {}, {"logprobs": 2}, {"temperature": 1.0, "seed": 4, "top_p": 0.5}, {"temperature": 0.8, "seed": 5, "n": 2}, {"frequency_penalty": 0.5},
]  # fmt: skip
MADE = {
    "medusa": published.medusa,
    "eagle": published.eagle,
    "eagle-bare": lambda target: published.eagle(target, own=False),
    "eagle3": lambda target: published.eagle3(target, known=300, own=True),
}


@pytest.fixture(scope="module")
def other() -> Path:
    """A model that agrees with the other one in nothing but the vocabulary."""
    return demo.random("tiny", seed=5, dtype="fp32")


def told(path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any] | None, **options: Any) -> tuple[list[Any], int, int]:
    """The tokens of rows of all kinds, some of which end before others; and what was tried, and came true."""
    prompts = [{"prompt_token_ids": [*range(20 + i, 24 + i)] * 3} for i in range(5)]
    params = [SamplingParams(**({"temperature": 0.0, "max_tokens": 3 + 4 * i, "ignore_eos": True} | way)) for i, way in enumerate(WAYS)]
    drafts: list[tuple[int, int]] = []
    more = {} if said is None else {"speculative_config": {"num_speculative_tokens": 3, "adaptive": False, **said}}
    with LLM(str(path), **options, **more) as llm:
        step = llm.engine.step
        monkeypatch.setattr(llm.engine, "step", lambda: (step(), drafts.extend(llm.engine.info.drafts))[0])
        found = [[choice.token_ids for choice in o.outputs] for _ in range(2) for o in llm.generate(prompts, params)]
        llm.engine.check_ledger()
    return found, sum(n for n, _ in drafts), sum(n for _, n in drafts)


CPU = OPTIONS | ONE_ROW | {"device": "cpu"}


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[Any]:
    """What the CPU says without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        return told(tiny, patch, None, **CPU)[0]


CASES = [
    {}, pytest.param(BLOCKS, marks=pytest.mark.slow), pytest.param({"tensor_parallel": 2}, marks=pytest.mark.slow),
    pytest.param({**BLOCKS, "tensor_parallel": 2}, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("more", CASES, ids=str)
def test_a_draft_model_changes_no_token(standin, tiny, plain, more, monkeypatch) -> None:
    """A copy of the model is as often right as on the CPU, which it would not be had it missed one id."""
    cores(monkeypatch, more.get("tensor_parallel", 1))
    said = {"model": str(tiny)}
    found, tried, true = told(tiny, monkeypatch, said, **OPTIONS | ONE_ROW | {"device": "neuron"} | more)
    assert found == plain
    assert (tried, true) == told(tiny, monkeypatch, said, **CPU)[1:] and tried > 50 and true > tried / 2


@pytest.mark.parametrize("more", CASES[:1] + CASES[2:3], ids=str)
def test_one_that_is_mostly_wrong_changes_none_either(standin, tiny, other, plain, more, monkeypatch) -> None:
    cores(monkeypatch, more.get("tensor_parallel", 1))
    found, tried, true = told(tiny, monkeypatch, {"model": str(other)}, **OPTIONS | ONE_ROW | {"device": "neuron"} | more)
    assert found == plain and tried > 50 and true < tried / 4


HEADS = [*((name, {}) for name in ("medusa", "eagle3")), *(pytest.param(name, more, marks=pytest.mark.slow) for name, more in (
    ("eagle", {}), ("eagle-bare", {}), *((name, more) for name in MADE for more in (BLOCKS, {"tensor_parallel": 2}))))]  # fmt: skip


@pytest.mark.parametrize(("name", "more"), HEADS, ids=str)
def test_heads_change_no_token(standin, tiny, plain, name, more, tmp_path, monkeypatch) -> None:
    """And are as often right as on the CPU: random ones hardly ever, so the drafts themselves are compared."""
    cores(monkeypatch, more.get("tensor_parallel", 1))
    folder = published.write(tmp_path, *MADE[name](hub.read_config(tiny)))
    said = {"method": name.partition("-")[0], "model": str(folder)}
    found, tried, true = told(tiny, monkeypatch, said, **OPTIONS | ONE_ROW | {"device": "neuron"} | more)
    assert found == plain
    assert (tried, true) == told(tiny, monkeypatch, said, **CPU)[1:] and tried > 50


@pytest.mark.parametrize("name", [None, "medusa", pytest.param("eagle", marks=pytest.mark.slow), "eagle3"])
def test_a_core_holds_what_was_planned(standin, tiny, other, name, tmp_path, monkeypatch) -> None:
    """Weights and states by the byte, constants aside; and a file that says so is accepted where there is no SDK."""
    cores(monkeypatch, 1)
    said: dict[str, Any] = {"model": str(other)}
    if name is not None:
        said = {"method": name, "model": str(published.write(tmp_path, *MADE[name](hub.read_config(tiny))))}
    options = OPTIONS | ONE_ROW | {"device": "neuron", "speculative_config": {"num_speculative_tokens": 3, "adaptive": False, **said}}
    with LLM(str(tiny), **options) as llm:
        loaded = llm.engine.runner.device._model
        weights = sum(t.nbytes for name, t in loaded.weights[0].items() if not name.endswith((".embed.first", ".rope.freq")))
        states = sum(t.nbytes for t in loaded.states[0].values())
        raw = read_raw(llm.config)
        planned = stage_memory(Wanted(llm.config, raw, draft=read_draft(llm.config, raw)), llm.engine.capacity, 1, 1)[0]
    assert (planned.weights, planned.kv) == (weights, states)
    assert not any("draft" in note for note in inspect(parse({"model": {"path": str(tiny)}, "instance": "inf2.xlarge", **options}), False))


def test_what_does_not_go_together_is_refused(tiny) -> None:
    given = {"model": {"path": str(tiny)}, "device": "neuron", "speculative_config": {"model": str(tiny)}}
    for more, says in (
        ({"sequence_parallel": True, "tensor_parallel": 2}, "sequence_parallel, .* with a draft model; leave one out"),
        ({"compile": {"async_mode": True}}, "compile.async_mode"),
        ({"pipeline_parallel": 2}, "pipeline_parallel"),
    ):
        with pytest.raises(ConfigError, match=f"speculative_config goes without {says}"):
            parse({**given, **more})
