"""Outputs match what was asked for, by other programs' judgement: jsonschema for schemas, re for regexes; and the limits hold."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from rayneuron import LLM, SamplingParams, StructuredOutputs
from rayneuron.engine import sampling
from rayneuron.errors import RequestError
from rayneuron.structured import Grammars
from rayneuron.text.text import Text
from tests.api import spelling

# In the style of tools' parameters and of public schemas.
KNOWN: list[dict[str, Any]] = [
    {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", "f"]}}, "required": ["city"]},
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{2,5}$"}, {"const": {"k": [1, True, None]}}]},
    {"$defs": {"leaf": {"enum": [1, "two", None]}}, "type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 2, "maxItems": 3},
    {
        "$defs": {"tree": {"type": "object", "properties": {"v": {"enum": [0, 1]}, "next": {"$ref": "#/$defs/tree"}}, "required": ["v"]}},
        "$ref": "#/$defs/tree",
    },
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": ["when"], "additionalProperties": False},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 5}, "maxProperties": 3},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "maximum": 7}}}, {"required": ["a"]}]},
    {"type": ["integer", "boolean"], "minimum": 3, "maximum": 12},
    {"type": "array", "prefixItems": [{"const": "move"}, {"type": "integer", "minimum": 0, "maximum": 3}], "items": False, "minItems": 2},
    {"type": "string", "enum": ["é漢😀", "plain", 'quo"te', "back\\slash"]},
]


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """One whose outputs come to an end."""
    deep = ["integer", "boolean", "null", "object", "object", "array", "anyOf"] if depth else []
    kind = rng.choice(["string", "enum", *deep])
    if kind == "string":
        low = rng.randrange(3)
        held = {"minLength": low, "maxLength": low + rng.randrange(9)}
        return {"type": "string"} | rng.choice([held, {"pattern": "^[a-z]{1,6}$"}])
    if kind == "integer":
        low = rng.randrange(-500, 500)
        return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 5, 1000])}
    if kind == "enum":
        return {"enum": rng.sample([1, "one", None, True, 2.5, "zwei", [1], {"a": "b"}], rng.choice([1, 3]))}
    if kind == "array":
        low = rng.randrange(3)
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(3)}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth - 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["name", "id", "a b", "naïve", "x", 'q"', "tags"], rng.choice([1, 2, 4]))
        needed = rng.sample(names, rng.randrange(len(names) + 1))
        parts = {name: schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": parts, "required": needed, "additionalProperties": False}
    return {"type": kind}


@pytest.fixture(scope="module")
def llm(tiny) -> Iterator[LLM]:
    with LLM(tiny, dtype="fp32", max_model_len=512, max_num_seqs=16, threads=1) as made:
        yield made
        made.engine.check_ledger()


def outputs(llm: LLM, wanted: list[StructuredOutputs], **params: Any) -> list[tuple[str, str | None]]:
    """Text and end of each, sampled."""
    words = {"temperature": 1.0, "max_tokens": 300, **params}
    asked = [SamplingParams(seed=i, structured_outputs=said, **words) for i, said in enumerate(wanted)]
    found = [result.outputs[0] for result in llm.generate([[30 + i % 50] for i in range(len(wanted))], asked)]
    return [(choice.text, choice.finish_reason) for choice in found]


def check_schemas(llm: LLM, count: int) -> None:
    rng = random.Random(count)
    schemas = [*KNOWN, *(schema(rng) for _ in range(count))]
    how = [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}]
    done = 0
    told = outputs(llm, [StructuredOutputs(json=each, **how[i % 3]) for i, each in enumerate(schemas)])
    for each, (text, reason) in zip(schemas, told, strict=True):
        assert reason in ("stop", "length")
        if reason == "stop":
            jsonschema.validate(json.loads(text), each, cls=jsonschema.Draft202012Validator)
            done += 1
    assert done > 0.9 * len(schemas), f"only {done} of {len(schemas)} outputs came to an end"


def test_finished_outputs_are_valid_by_jsonschema(llm: LLM) -> None:
    check_schemas(llm, 60)


@pytest.mark.slow
def test_a_thousand_schemas(llm: LLM) -> None:
    check_schemas(llm, 1000)


def test_regexes_choices_and_grammars(llm: LLM) -> None:
    patterns = [r"\d{3}-\d{4}", "(ab|cd){1,5}e?", "[α-ω]{2,4}", r"[^\n]{5,9}!", r"(yes|no)(, (yes|no)){0,3}\."]
    patterns.append(r"[a-z_]+@[A-Z]{1,5}\.(com|org)")
    for pattern, (text, reason) in zip(patterns, outputs(llm, [StructuredOutputs(regex=p) for p in patterns]), strict=True):
        assert reason == "length" or re.fullmatch(pattern, text), (pattern, text)
        assert reason == "stop" or "+" in pattern
    choices = ("yes", "yes please", "né", 'with "quotes"', "two\nlines")
    picked = {text for text, reason in outputs(llm, [StructuredOutputs(choice=choices)] * 40) if reason == "stop"}
    assert picked <= set(choices) and len(picked) > 2
    lark = 'start: "<" pair ("," pair)* ">"\npair: /[a-z]{1,3}/ "=" %json {"type": "integer", "minimum": 0, "maximum": 99}'
    gbnf = 'root ::= "(" item ("," item)? ")"\nitem ::= [0-9] | "x"'
    for said, pattern in ((lark, r"<[a-z]{1,3}=\d{1,2}(,[a-z]{1,3}=\d{1,2})*>"), (gbnf, r"\((\d|x)(,(\d|x))?\)")):
        for text, reason in outputs(llm, [StructuredOutputs(grammar=said)] * 4):
            assert reason == "length" or re.fullmatch(pattern, text), text
    objects = outputs(llm, [StructuredOutputs(json_object=True)] * 8)
    assert all(isinstance(json.loads(text), dict) for text, reason in objects if reason == "stop")


def test_structural_tags_hold_inside_and_leave_the_rest(llm: LLM) -> None:
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"enum": [1, 22]}, "end": "</f>"}]}
    grammars = llm.engine.constraining._compiles
    assert grammars is not None
    matcher = grammars.begin(StructuredOutputs(structural_tag=tag)).result()
    ids = llm.text.encode("some text <f>22</f> more", add_special_tokens=False)
    assert matcher.allows(ids) == len(ids)
    wrong = llm.text.encode("some text <f>23</f>", add_special_tokens=False)
    assert matcher.allows(wrong) < len(wrong)


def test_every_end_of_a_model_is_one_and_ids_without_bytes_never_come(tiny, tmp_path) -> None:
    text = Text(tiny)
    text.eos_ids = frozenset({7, 11})
    grammars = Grammars(text, 600)  # a head wider than the tokenizer
    mask = np.zeros(19, np.uint32)
    matcher = grammars.begin(StructuredOutputs(regex="a?")).result()
    matcher.fill(mask)
    allowed = [token for token in range(600) if mask[token // 32] >> (token % 32) & 1]
    assert {7, 11} <= set(allowed) and max(allowed) < 512 and all(text.token_bytes(t) == b"a" for t in set(allowed) - {7, 11})
    matcher.consume([allowed[-1] if allowed[-1] not in (7, 11) else allowed[0]])
    mask[:] = 0
    matcher.fill(mask)
    assert {token for token in range(600) if mask[token // 32] >> (token % 32) & 1} == {7, 11}
    grammars.close()


def test_a_tokenizer_without_bytes_is_refused_by_name(tmp_path) -> None:
    window = Grammars(Text(spelling.word_pieces(tmp_path)), 100)
    with pytest.raises(RequestError, match="does not say which bytes"):
        window.check(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("how", [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.0), (1.2, 0, 0.95, 0.02)])
def test_a_masked_draw_is_a_draw_from_masked_logits(how: tuple[float, int, float, float]) -> None:
    rng = torch.Generator().manual_seed(5)
    for vocab in (5, 32, 511, 5000):
        for share in (0.001, 0.3, 1.0):
            row = torch.randn(1, vocab, generator=rng) * 4
            bits = torch.rand(vocab, generator=rng) < share
            bits[vocab // 2] = True
            mask = np.packbits(np.pad(bits.numpy(), (0, -vocab % 32)), bitorder="little").view(np.uint32)
            args = (*how, float(torch.rand(1, generator=rng)))
            token = sampling.on_host(row[0], args, mask)
            masked = torch.where(bits, row, float("-inf"))
            assert bits[token] and token == sampling.on_host(masked[0], args)
            assert torch.equal(sampling.masked(row[0], mask), masked[0])


def hostile(rng: random.Random) -> StructuredOutputs:
    """What takes a compiler or a matcher long."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(rng.choice([60, 200])):
        deep = {"anyOf": [{"type": "object", "properties": {"a": deep, "b": deep if rng.random() < 0.02 else {}}}, {"type": "array"}]}
    many = {"type": "array", "minItems": 10**6, "maxItems": 10**7, "items": {"type": "string", "maxLength": 10**6}}
    rules = "\n".join(f"a{i}: a{i + 1} a{i + 1} | /x*{i}/" for i in range(300))
    return rng.choice(
        [
            lambda: StructuredOutputs(regex="(" * 40 + "a" + ")*b?)*" * 20 + ")" * 20),
            lambda: StructuredOutputs(regex=f"(.*a.{{{rng.randrange(200, 900)}}}b){{50}}"),
            lambda: StructuredOutputs(regex=f"(a?){{{rng.randrange(1000, 9000)}}}a{{5000}}"),
            lambda: StructuredOutputs(regex="|".join(f"{rng.randrange(10**9)}.*x" for _ in range(5000))),
            lambda: StructuredOutputs(json=deep),
            lambda: StructuredOutputs(json={"enum": [str(rng.random()) * 5 for _ in range(2000)]}),
            lambda: StructuredOutputs(json=many),
            lambda: StructuredOutputs(json={"type": "object", "properties": {f"p{i}": {"pattern": f".*{i}.*"} for i in range(2000)}}),
            lambda: StructuredOutputs(grammar=f"start: a0\n{rules}\na300: /y/"),
            lambda: StructuredOutputs(grammar='start: e\ne: e "+" e | e e | /[a-z]*/ | ""'),
            lambda: StructuredOutputs(choice=tuple(str(rng.random()) for _ in range(6000))),
        ]
    )()


def test_what_cannot_be_compiled_says_why_and_what_to_write(llm: LLM) -> None:
    for said, why in (
        (StructuredOutputs(regex="("), "unclosed group"),
        (StructuredOutputs(json={"type": "string", "pattern": "(?=a)"}), "look-around, .* is not supported"),
        (StructuredOutputs(json={"type": "array", "uniqueItems": True}), '"uniqueItems".*; leave them out, or write "x-guidance"'),
    ):
        with pytest.raises(RequestError, match=why):
            llm.generate([[31]], SamplingParams(structured_outputs=said))
    schema = {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"const": 5}, "x-guidance": {"lenient": True}}
    made = llm.generate([[31]], SamplingParams(structured_outputs=StructuredOutputs(json=schema), max_tokens=90))[0].outputs[0]
    assert json.loads(made.text) in ([], [5])


def test_hostile_constraints_end_and_their_neighbours_go_on(llm: LLM) -> None:
    """Each comes to an end, with text or an error, and streams beside it get their tokens meanwhile."""
    rng = random.Random(1)
    wanted = [hostile(rng) for _ in range(12)]
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    alone = llm.generate([[31]], plain)[0].outputs[0].token_ids
    ends: list[str] = []

    def ask(said: StructuredOutputs) -> None:
        try:
            params = SamplingParams(max_tokens=12, temperature=1.0, structured_outputs=said)
            ends.append(str(llm.generate([[40]], params)[0].outputs[0].finish_reason))
        except RequestError as refused:
            assert refused.param == "structured_outputs"
            ends.append("refused")

    threads = [threading.Thread(target=ask, args=(said,)) for said in wanted]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert llm.generate([[31]], plain)[0].outputs[0].token_ids == alone
        assert time.monotonic() - began < 120, "a constraint takes without end"
    assert len(ends) == len(wanted) and "refused" in ends
