"""A constrained choice gives the same tokens alone and beside others, drafted, preempted, overlapped, moved; and its neighbours theirs."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
from msgspec.structs import replace

from rayneuron.constraints import StructuredOutputs
from rayneuron.engine.engine import Engine
from rayneuron.engine.grammar import Constraining, Grammar
from rayneuron.engine.host_sampling import HostSampling
from rayneuron.engine.speculation.drafting import look_up
from rayneuron.errors import RequestError
from rayneuron.structured import Grammars, _Matcher
from rayneuron.text.text import Text
from rayneuron.types import Request, SamplingParams
from tests.engine import test_draft_model, test_fuzz, test_speculation
from tests.engine.beside import Beside

VOCAB, ENDS = 512, frozenset({7, 11})
PERSON = {
    "type": "object",
    "properties": {"kind": {"const": "p"}, "n": {"type": "string", "maxLength": 4}, "a": {"enum": [1, 22]}},
    "required": ["kind", "n", "a"],
    "additionalProperties": False,
}
PLAIN = StructuredOutputs(json=PERSON, disable_any_whitespace=True)
WORDS = StructuredOutputs(regex="[a-z]{3,12}( [a-z]{2,9}){0,4}")
WIDE = StructuredOutputs(regex="(?s:.{1,60})")  # nearly any token may come
KINDS: list[dict] = [
    {"structured_outputs": StructuredOutputs(json=PERSON)},
    {"structured_outputs": PLAIN, "temperature": 1.0, "seed": 4, "n": 3},
    {"structured_outputs": WORDS, "temperature": 0.9, "seed": 9, "top_p": 0.9, "top_k": 50, "logprobs": 3},
    {"structured_outputs": WORDS, "temperature": 1.0, "seed": 1, "repetition_penalty": 1.4, "presence_penalty": 0.5, "min_tokens": 9},
    {"structured_outputs": WORDS, "ignore_eos": True, "no_repeat_ngram_size": 2},
    {"structured_outputs": StructuredOutputs(choice=("maybe", "maybe not", "never")), "logit_bias": {20: 50.0}},
    {"structured_outputs": StructuredOutputs(regex="[0-9]{9}", after=(40, 41), free_tokens=5), "temperature": 1.0, "seed": 3},
    {"structured_outputs": StructuredOutputs(after=(40, 41), free_tokens=5), "temperature": 1.0, "seed": 3},
    {"structured_outputs": StructuredOutputs(after=(40, 41), begins=(20,), free_tokens=6), "logit_bias": {20: 100.0}},
    {"structured_outputs": StructuredOutputs(after=(40, 41), begins=(20, 20), free_tokens=6), "min_tokens": 20},
    {"structured_outputs": WORDS, "temperature": 1.0, "seed": 2, "typical_p": 0.5, "logprobs": 0, "logprob_token_ids": (9, 3)},
    {"structured_outputs": WIDE},
    {"structured_outputs": WIDE, "min_tokens": 20, "logprobs": 2},
    {},
    {"temperature": 1.0, "seed": 5, "logprobs": 1},
    {"temperature": 1.2, "seed": 6, "frequency_penalty": 0.5},
]


@pytest.fixture(scope="module")
def grammars(tiny) -> Iterator[Grammars]:
    text = Text(tiny)
    text.eos_ids = ENDS
    made = Grammars(text, VOCAB)
    yield made
    made.close()


def requests(seed: int) -> list[Request]:
    """Every kind, twice, behind prompts of any length."""
    rng = random.Random(seed)
    made = []
    for i, kind in enumerate(KINDS * 2):
        prompt = [rng.randrange(12, VOCAB) for _ in range(rng.choice([1, 9, 16, 30]))]
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 34, **kind})
        made.append(Request(id=f"r{i}", prompt_ids=prompt, params=params))
    return made


def constrained(engine: Engine, grammars: Grammars) -> Engine:
    engine.constraining = Constraining(grammars, VOCAB)
    return engine


@pytest.fixture(scope="module")
def alone(tiny, grammars) -> dict:
    """What each gives by itself."""
    engine, out = constrained(test_speculation.build(tiny, rows=1, chunk=64), grammars), {}
    for request in requests(1):
        for index in range(request.params.n):
            seed = request.params.seed
            params = replace(request.params, n=1, seed=None if seed is None else seed + index)
            solo = Request(id="solo", prompt_ids=list(request.prompt_ids), params=params)
            out[request.id, index] = test_speculation.run(engine, [solo])["solo", 0]
    return out


def test_what_comes_matches(alone, grammars):
    text, seen = grammars._text, set()
    for request in requests(1):
        said = request.params.structured_outputs
        for index in range(request.params.n if said else 0):
            ids, _, (reason, eos, _) = alone[request.id, index]
            if not said.kind:
                due = 0 if not said.begins else 1 if said.begins == (20,) else None  # from where tokens are counted, if ever
                forced = next((i for i in range(len(ids)) if ids[i : i + 2] == said.after), None)
                assert forced == (None if due is None else due + said.free_tokens) or reason == "stop"
                continue
            if reason != "stop":
                continue
            assert eos and ids[-1] in ENDS
            ids = ids[:-1]
            if said.after:
                at = next(i for i in range(len(ids)) if ids[i : i + 2] == said.after)
                assert at <= said.free_tokens + 1
                ids = ids[at + 2 :]
            whole = b"".join(text.token_bytes(token) for token in ids).decode()
            pattern = said.regex or ("maybe|maybe not|never" if said.choice else r'\{"kind":"p","n":"[^"]*","a":(1|22)\}')
            assert re.fullmatch(pattern, whole, re.S), (said, whole)
            seen.add(said.kind)
            if request.params.ignore_eos:
                assert whole.count(" ") == 4  # it ended where nothing else was left
    assert seen == {"json", "regex", "choice"}


WAYS = {
    "together": lambda path: test_speculation.build(path, rows=5),
    "overlapped": lambda path: test_fuzz.build(path, rows=5, ahead=True),
    "preempted": lambda path: test_speculation.build(path, rows=5, kv_tokens=144, block=16),
    "drafted": lambda path: test_speculation.build(path, 3, partial(look_up, 1, 3), block=16),
    "drafted, preempted": lambda path: test_speculation.build(path, 4, partial(look_up, 1, 3), kv_tokens=144, block=16, cached=True),
    "drafted by a model": lambda path: test_draft_model.build(path, path, 4, int8=True, kv_tokens=144, block=16, cached=True),
    "only what is forced": lambda path: test_speculation.build(path, 4, lambda sequence, most: ((), 1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_running_changes_a_token(tiny, grammars, alone, way):
    engine = constrained(WAYS[way](tiny), grammars)
    assert test_speculation.run(engine, requests(1)) == alone
    engine.check_ledger()
    if "preempted" in way:
        assert engine.scheduler.preemptions > 0


def test_rows_chosen_in_one_call_are_chosen_as_alone(tiny, grammars, alone, monkeypatch):
    counts, together = Counter(), HostSampling.next_ids

    def one_by_one(self, rows, sequences, taken):
        found = together(self, rows, sequences, taken)
        for token, sequence, row in zip(found, sequences, rows, strict=True):
            counts["edited" if sequence.params.edits_logits else "told" if token is not None else "left"] += 1
            assert token is None or (not sequence.params.edits_logits and token == self.next_id(row, sequence, None))
        return [None] * len(found)

    monkeypatch.setattr(HostSampling, "next_ids", one_by_one)
    assert test_speculation.run(constrained(WAYS["together"](tiny), grammars), requests(1)) == alone
    assert counts["told"] > 100


def test_where_the_likeliest_may_come_no_mask_is_made(tiny, grammars, monkeypatch):
    """But for the first token, which a mask is made for beside the prompt's step, and ends; of what strays again and again it is."""
    made, fill = Counter(), _Matcher.fill

    def counted(self, mask):
        made["all"] += 1
        fill(self, mask)

    monkeypatch.setattr(_Matcher, "fill", counted)
    for said, drafts in ((WIDE, None), (WIDE, partial(look_up, 1, 3)), (WORDS, None)):
        made.clear()
        engine = constrained(test_speculation.build(tiny, 3, drafts), grammars)
        params = SamplingParams(temperature=0, max_tokens=24, structured_outputs=said, ignore_eos=True)
        ids, *_ = test_speculation.run(engine, [Request(id="a", prompt_ids=[30] * 9, params=params)])["a", 0]
        assert len(ids) > 12 and (made["all"] <= 4 if said is WIDE else made["all"] >= len(ids) // 2)


def test_what_was_taken_and_has_not_come_is_taken_back(tiny, grammars):
    """Masks and answers are those of a matcher that has only followed what came."""
    engine = constrained(test_speculation.build(tiny, rows=1), grammars)
    engine.add(Request(id="a", prompt_ids=[30] * 9, params=SamplingParams(temperature=0, max_tokens=30, structured_outputs=WORDS)))
    while not (choice := next(iter(engine._requests["a"].values()))).grammar or choice.generated < 1:
        engine.step()

    def fresh() -> Grammar:
        return Grammar(choice, grammars.begin(WORDS).result().copy(), WORDS, VOCAB)

    rng, grammar, last = random.Random(3), fresh(), len(choice.ids) + 8
    while len(choice.ids) < last:
        mask = fresh().mask()
        may = [token for token in range(VOCAB) if mask[token // 32] >> token % 32 & 1 and token not in ENDS]
        tried, other = [rng.choice(may) for _ in range(3)], next(token for token in range(12, VOCAB) if token not in may)
        assert all(grammar.takes(token) for token in (*tried, tried[-1])) and not grammar.takes(other)
        assert grammar.takes(tried[0]) and (rng.random() < 0.5 or (grammar.mask() == fresh().mask()).all())
        if rng.random() < 0.7:
            choice.ids.append(rng.choice((tried[0], rng.choice(may))))
        assert grammar.forced(9) == fresh().forced(9) and grammar.allowed(tuple(may[:1] * 2)) == fresh().allowed(tuple(may[:1] * 2))


def test_forced_tokens_take_fewer_steps(tiny, grammars):
    """What a schema leaves no choice of comes several at once, and is what comes one by one."""
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=PLAIN)
    ask = Request(id="a", prompt_ids=[30] * 9, params=params)
    engines = [constrained(test_speculation.build(tiny, 1, propose), grammars) for propose in (None, lambda sequence, most: ((), 1))]
    told = [test_speculation.run(engine, [replace(ask)]) for engine in engines]
    assert told[0] == told[1] and engines[1].steps < 0.8 * engines[0].steps


def test_it_goes_on_behind_what_another_engine_has_generated(tiny, grammars, alone):
    engine = constrained(test_speculation.build(tiny, rows=3), grammars)
    for request in requests(1)[: len(KINDS)]:
        if request.params.structured_outputs is None or request.params.n > 1:
            continue
        whole = alone[request.id, 0][0]
        for cut in range(1, len(whole), 3):
            rest = replace(request, output_ids=list(whole[:cut]))
            assert test_speculation.run(engine, [rest])[request.id, 0][0] == whole[cut:], (request.params.structured_outputs, cut)


def test_first_tokens_may_come_from_a_pool(tiny, grammars, alone):
    here, there = (constrained(test_fuzz.build(tiny, rows=4, block=16), grammars) for _ in range(2))
    beside = Beside(here, there, random.Random(3), faults=0.2)
    assert test_fuzz.drain(here, requests(1)).keys() == alone.keys()
    ids = {key: value[0] for key, value in test_speculation.run(here, requests(1)).items()}
    assert ids == {key: value[0] for key, value in alone.items()} and beside.adopted > 5


def test_what_cannot_be_compiled_ends_the_call_and_nobody_else(tiny, grammars, alone):
    engine = constrained(test_speculation.build(tiny, rows=3), grammars)
    bad = {
        "regex": StructuredOutputs(regex="("),
        "schema": StructuredOutputs(json={"type": "strange"}, field="response_format"),
        "text": StructuredOutputs(json="{"),
        "grammar": StructuredOutputs(grammar="start: nowhere"),
        "gbnf": StructuredOutputs(grammar='root ::= "a'),
        "large": StructuredOutputs(choice=("x" * 200_000,)),
        "tag": StructuredOutputs(structural_tag={"triggers": ["<f"], "structures": [{"begin": "<g>", "schema": {}, "end": ""}]}),
    }
    wrong = [Request(id=name, prompt_ids=[20], params=SamplingParams(n=2, structured_outputs=said)) for name, said in bad.items()]
    good = requests(1)[:3]
    for request in (*good, *wrong):
        engine.add(request)
    out: dict = {}
    while engine.has_work:
        test_speculation.collect(out, engine.step())
    for name, said in bad.items():
        for index in range(2):
            (delta,) = out[name, index]
            assert (delta.finish_reason, delta.fault, delta.param) == ("error", "call", said.field), delta
            assert delta.error.startswith(said.field)
    assert {key: test_speculation.told(out[key]) for key in alone if key[0] in {r.id for r in good}} == {
        key: alone[key] for key in alone if key[0] in {r.id for r in good}
    }
    engine.check_ledger()


def test_one_that_is_aborted_while_it_compiles_leaves_nothing(tiny, grammars):
    engine = constrained(test_speculation.build(tiny, rows=3), grammars)
    engine.add(Request(id="a", prompt_ids=[20], params=SamplingParams(n=3, structured_outputs=StructuredOutputs(regex="[a-f]{1,77}x"))))
    engine.abort("a", 0)
    engine.abort("a")
    ends = [delta for _ in range(3) for delta in engine.step()]
    assert sorted(d.index for d in ends) == [0, 1, 2] and {d.finish_reason for d in ends} == {"abort"}
    engine.check_ledger()
    assert not engine.has_work and "a" not in engine.constraining.coming


def test_a_constraint_and_bans_that_leave_nothing_end_the_choice(tiny, grammars):
    engine = constrained(test_speculation.build(tiny, rows=3), grammars)
    digits = [token for token in range(VOCAB) if grammars._text.token_bytes(token)[:1].isdigit()]
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="[0-9]{4}"), banned_token_ids=tuple(digits), temperature=0)
    engine.add(Request(id="a", prompt_ids=[20], params=params))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert [(d.finish_reason, d.fault, d.param) for d in deltas] == [("error", "request", "structured_outputs")]


def test_without_a_compiler_it_is_refused(tiny, grammars, monkeypatch):
    said = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    with pytest.raises(RequestError, match="cannot constrain"):
        test_speculation.build(tiny, rows=1).validate(Request(id="a", prompt_ids=[20], params=said))
    monkeypatch.setattr("rayneuron.structured.find_spec", lambda name: None)
    budget = SamplingParams(structured_outputs=StructuredOutputs(after=(40,), free_tokens=0), temperature=0, max_tokens=2)
    ids = test_speculation.run(test_speculation.build(tiny, rows=1), [Request(id="a", prompt_ids=[20], params=budget)])["a", 0][0]
    assert ids[0] == 40  # which needs none
    lacking = constrained(test_speculation.build(tiny, rows=1), Grammars(grammars._text, VOCAB))
    with pytest.raises(RequestError, match=re.escape("install rayneuron[structured]")):
        lacking.validate(Request(id="a", prompt_ids=[20], params=said))
