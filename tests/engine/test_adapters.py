"""Adapters in the engine: who may begin by the ledger, what comes out by solo runs and by merged weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule
from safetensors.torch import load_file

from rayneuron import LLM, SamplingParams
from rayneuron.engine.adapters import Adapters
from rayneuron.errors import CheckpointError, RequestError, UnknownModel
from rayneuron.models import hub
from rayneuron.types import Request
from tests.models import adapters as made
from tests.models import published

NAMES = tuple("abcdefgh")


class Choice:
    """What the ledger looks at of a sequence; each is equal to itself alone, as those are."""

    def __init__(self, adapter: str | None) -> None:
        self.request = SimpleNamespace(adapter=adapter)
        self.hold: SimpleNamespace | None = None


class Ledger(RuleBasedStateMachine):
    """Random calls in the order an engine makes them, against plain sets. Choices wait in order of arrival."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[str] = []
        self.ledger = Adapters(2, 8, self.dropped.append)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.installed: dict[int, str] = {}
        self.versions = 0

    @rule(name=st.sampled_from(NAMES[:4]))
    def load(self, name: str) -> None:
        self.versions += 1
        self.ledger.name(name, f"{name}{self.versions}")

    @precondition(lambda self: self.ledger.names)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        self.ledger.forget(data.draw(st.sampled_from(sorted(self.ledger.names))))

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from([None, *sorted(self.ledger.names.values())]))
        choice = Choice(adapter)
        if adapter is not None:
            self.ledger.check(adapter)
        self.ledger.opened(choice.request)
        self.waiting.append(choice)

    @rule()
    def begin(self) -> None:
        first = self.ledger.first(self.waiting)
        if first is None:
            assert all(c.request.adapter is not None for c in self.waiting)
            return
        for passed in self.waiting[: self.waiting.index(first)]:  # who is passed waits for a slot that others have, or that is kept back
            assert passed.request.adapter is not None
        self.waiting.remove(first)
        first.hold = SimpleNamespace(slot=-1)
        self.ledger.seat(first)
        self.running.append(first)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempted=st.booleans())
    def stop(self, data: st.DataObject, preempted: bool) -> None:
        choice = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.ledger.leave(choice)
        if preempted:
            self.waiting.insert(0, choice)
        else:
            self.ledger.closed(choice.request)

    @rule()
    def step(self) -> None:
        for slot, adapter in self.ledger.installs():
            assert adapter in self.ledger.kept and adapter not in self.dropped
            self.installed[slot] = adapter
        self.ledger.installed()
        for choice in self.running:
            assert choice.request.adapter is None or self.installed[choice.hold.slot] == choice.request.adapter

    @rule()
    def the_first_in_line_comes_to_its_turn(self) -> None:
        """Others keep coming with adapters that have slots; the head begins once who ran before it has ended."""
        if not self.waiting:
            return
        head, before = self.waiting[0], list(self.running)
        while head in self.waiting:
            resident = [c.request.adapter for c in self.running] or [None]
            late = Choice(resident[-1])
            self.ledger.opened(late.request)
            self.waiting.append(late)
            while self.ledger.first(self.waiting) is not None:
                self.begin()
            if head in self.waiting:
                assert before, "nobody is left to wait for"
                choice = before.pop()
                self.running.remove(choice)
                self.ledger.leave(choice)
                self.ledger.closed(choice.request)

    @invariant()
    def balances(self) -> None:
        self.ledger.check_ledger(self.running, [c.request for c in (*self.running, *self.waiting)])
        assert set(self.dropped) & self.ledger.kept == set()


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: str(made.write(root / name, tiny, r=1 + i % 4, seed=i, size=0.2)) for i, name in enumerate(NAMES)}


def open_llm(tiny: Path, folders: dict[str, str] | None = None, **words: Any) -> LLM:
    lora = {} if folders is None else {"lora": {"lora_modules": folders, "max_lora_rank": 8, "max_loras": 2, **words.pop("lora", {})}}
    return LLM(tiny, dtype="fp32", max_model_len=96, max_num_seqs=words.pop("max_num_seqs", 4), threads=1, seed=5, **lora, **words)


def asked(llm: LLM, ids: list[int], name: str | None, **params: Any) -> Request:
    return llm.request(ids, SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params), name)


def run(llm: LLM, *requests: Request) -> list[list[int]]:
    out: dict[str, list[int]] = {request.id: [] for request in requests}
    for delta in llm.tokens(requests):
        out[delta.request_id] += delta.token_ids
    return list(out.values())


def audit(llm: LLM) -> None:
    llm._loop.ask(lambda engine: engine.check_ledger()).result()


def prompts(count: int, seed: int = 0, most: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(12, 512) for _ in range(draw.randrange(3, most))] for _ in range(count)]


def test_text_is_that_of_merged_weights_and_base_text_that_of_no_adapters(tiny: Path, folders: dict[str, str]) -> None:
    """Greedy tokens of transformers; all in one batch, with sampled neighbours."""
    ids = prompts(4)
    with open_llm(tiny) as plain, open_llm(tiny, folders, lora={"max_loras": 3}) as llm:
        names = ["a", None, "b", "c"]
        got = run(llm, *[asked(llm, p, name) for p, name in zip(ids, names, strict=True)])
        assert got[1] == run(plain, asked(plain, ids[1], None))[0]
        warm = {"temperature": 0.8, "seed": 3, "logprobs": 2}
        assert run(llm, asked(llm, ids[1], None, **warm), asked(llm, ids[0], "a"))[0] == run(plain, asked(plain, ids[1], None, **warm))[0]
        audit(llm)
    for place, name in enumerate(names):
        if name is not None:
            assert got[place] == greedy(tiny, folders[name], ids[place], 8)
    assert got[0] != greedy(tiny, None, ids[0], 8)


def greedy(base: Path, adapter: str | None, ids: list[int], count: int) -> list[int]:
    """transformers' tokens with the adapter in its weights."""
    model = tf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True).eval()
    pairs = {} if adapter is None else load_file(Path(adapter) / "adapter_model.safetensors")
    rank = next((len(t) for name, t in pairs.items() if "lora_A" in name), 1)
    with torch.no_grad():
        for name in [n for n in pairs if "lora_A" in n]:
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight += 6 / rank * pairs[name.replace("lora_A", "lora_B")] @ pairs[name]
        known = list(ids)
        for _ in range(count):
            known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
    return known[len(ids) :]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads_draft_for_whoever_has_an_adapter_too(tiny: Path, folders: dict[str, str], tmp_path: Path, method: str) -> None:
    """Heads know of none, and it changes no token: beside others, greedy and sampled."""
    heads = published.write(tmp_path, *getattr(published, method)(hub.read_config(tiny)))
    said = {"method": method, "model": str(heads), "adaptive": False, "num_speculative_tokens": 3}
    ids, names, kinds = prompts(8, 3), ["a", None, "b", "c", "a", None, "d", "b"], [{}, {"temperature": 0.9, "seed": 1, "logprobs": 1}]
    found, tags = [], set()
    for words in ({}, {"speculative_config": said}):
        with open_llm(tiny, folders, **words) as llm:
            step = llm.engine.step
            llm.engine.step = lambda step=step, llm=llm: (step(), tags.add(llm.engine.info.tag))[0]  # type: ignore[method-assign, misc]
            found.append(run(llm, *[asked(llm, *each, **kinds[i % 2]) for i, each in enumerate(zip(ids, names, strict=True))]))
            audit(llm)
    assert found[0] == found[1] and "verify" in tags


def test_eight_adapters_on_two_slots(tiny: Path, folders: dict[str, str]) -> None:
    """A hundred requests of all kinds at once, with little KV, so that some are preempted: each as alone."""
    draw = random.Random(4)
    ids, names = prompts(100, 7), [draw.choice([*NAMES, None]) for _ in range(100)]
    some = [{}, {"temperature": 0.9, "seed": 1}, {"logprobs": 1, "max_tokens": 3}, {"n": 2, "temperature": 1.0, "seed": 2}]
    kinds = [draw.choice(some) for _ in ids]
    with open_llm(tiny, folders, kv_cache_tokens=128, block_size=16) as llm:
        solo = [run(llm, asked(llm, *each, **kind)) for *each, kind in zip(ids, names, kinds, strict=True)]
        before = llm.engine.snapshot().preemptions
        together = run(llm, *[asked(llm, *each, **kind) for *each, kind in zip(ids, names, kinds, strict=True)])
        audit(llm)
        assert llm.engine.snapshot().preemptions > before
    several = [i for i, kind in enumerate(kinds) if "n" in kind]  # the tokens of two choices come in any order
    assert [sorted(together[i]) for i in several] == [sorted(solo[i][0]) for i in several]
    assert [t for i, t in enumerate(together) if i not in several] == [t[0] for i, t in enumerate(solo) if i not in several]


def test_prefixes_are_shared_within_an_adapter_only(tiny: Path, folders: dict[str, str]) -> None:
    ids = prompts(1, 3)[0] * 9
    with open_llm(tiny, folders, block_size=16) as llm:
        def cached(name: str | None) -> int:
            return next(iter(llm.tokens([asked(llm, ids[:80], name, max_tokens=1)]))).cached_tokens

        assert [cached(name) for name in (None, "a", "b", "a", None)] == [0, 0, 0, 79, 79]


@pytest.mark.parametrize("words", [{"tensor_parallel": 2}, pytest.param({"pipeline_parallel": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_group_of_ranks(tiny: Path, folders: dict[str, str], words: dict[str, int]) -> None:
    """Every rank holds its share, and changes its slots at the same step."""
    ids, names = prompts(6, 2), ["a", "b", "c", None, "a", "d"]
    with open_llm(tiny, folders) as alone, open_llm(tiny, folders, **words) as group:
        wanted = run(alone, *[asked(alone, *each) for each in zip(ids, names, strict=True)])
        assert run(group, *[asked(group, *each) for each in zip(ids, names, strict=True)]) == wanted
        with pytest.raises(CheckpointError, match="no adapter"):
            group._loop.ask(lambda engine: engine.runner.shelf.read(str(tiny))).result()
        assert run(group, asked(group, ids[0], "a")) == wanted[:1]
        audit(group)


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [{}, {"method": "draft_model", "quantization": "int8"}], ids=["echo", "model"])
def test_drafts_are_verified_with_the_adapter(tiny: Path, folders: dict[str, str], drafting: dict[str, Any]) -> None:
    ids = [p * 3 for p in prompts(4, 9, 12)]
    with open_llm(tiny, folders) as plain, open_llm(tiny, folders, speculative_config={**drafting, "adaptive": False}) as llm:
        wanted, got = (run(e, *[asked(e, p, n, max_tokens=30) for p, n in zip(ids, "aab" + "c", strict=True)]) for e in (plain, llm))
    assert got == wanted


def test_torchs_products_add_the_same(tiny: Path, folders: dict[str, str]) -> None:
    """Layers that run operation by operation: here because KV is stored small."""
    ids = prompts(3, 5)
    with open_llm(tiny, folders, kv_dtype="f8e4m3") as llm:
        solo = [run(llm, asked(llm, *each))[0] for each in zip(ids, ("a", None, "b"), strict=True)]
        assert run(llm, *[asked(llm, *each) for each in zip(ids, ("a", None, "b"), strict=True)]) == solo
        assert len({tuple(t) for t in run(llm, *[asked(llm, ids[0], name) for name in ("a", None, "b")])}) == 3


REFUSED: list[tuple[Callable[[Path, dict[str, str]], dict[str, Any]], str]] = [
    (lambda tiny, folders: {"lora_modules": {"x": str(tiny)}}, "lora.lora_modules.x: .* is no adapter"),
    (lambda tiny, folders: {"lora_modules": {"x": "/nowhere"}}, "lora.lora_modules.x: /nowhere is no directory here"),
    (lambda tiny, folders: {"lora_modules": {"x": str(tiny / "config.json")}}, "lora.lora_modules.x: .*config.json is no directory here"),
    (lambda tiny, folders: {"max_lora_rank": 2}, "max_lora_rank is 2"),
]


@pytest.mark.parametrize(("said", "why"), REFUSED)
def test_a_wrong_file_says_which_adapter(tiny: Path, folders: dict[str, str], said: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        open_llm(tiny, folders, lora=said(tiny, folders))


def test_who_asks_for_what_is_not_there(tiny: Path, folders: dict[str, str]) -> None:
    with open_llm(tiny, {"a": folders["a"]}) as llm, open_llm(tiny) as plain:
        request = asked(llm, [20, 30], "a")
        request.adapter = "other"
        with pytest.raises(UnknownModel, match="unloaded"):
            run(llm, request)
        with pytest.raises(UnknownModel, match="there are a"):
            llm.generate([[20, 30]], adapter="b")
        assert llm.generate([[20, 30]], {"temperature": 0}, adapter="a") != llm.generate([[20, 30]], {"temperature": 0})
        with pytest.raises(RequestError, match="no adapters"):
            plain.engine.validate(request)
