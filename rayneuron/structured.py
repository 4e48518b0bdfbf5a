"""Constraints compiled by llguidance, within limits, on threads of their own."""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from threading import Lock, get_native_id
from typing import Any

import msgspec
import numpy as np

from rayneuron.constraints import StructuredOutputs
from rayneuron.engine.grammar import Mask, Matcher
from rayneuron.errors import RequestError
from rayneuron.text.detokenizer import Bytes
from rayneuron.text.text import Text

MAX_BYTES = 128 * 1024  # of a constraint as text
KEPT = 256  # compiled ones
WHITESPACE = r"[ \n\r\t]{0,20}"  # between the parts of JSON; without an end small models write newlines until max_tokens
# Fuel is about 50 million a second: what one constraint may take to begin with, and in one step, in which all other rows wait for it.
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 50_000, "step_max_items": 10_000, "max_grammar_size": 100_000}
# Regexes of which many tokens are texts: where one fits as a whole, those need not be looked at. llguidance's own leave the last ten
# characters of a string with maxLength out, where each mask then takes ten times as long.
_WITHIN = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_WITHIN}{{1,{most}}}" for most in (3, 6, 10, 30)), f"{_WITHIN}+"]
POLITE = 10  # niceness of compiling, which may take long
MISSING = "this server cannot constrain its output: it lacks llguidance; install rayneuron[structured]"


class Grammars:
    """`engine.grammar.Compiles` over a model's vocabulary. What was compiled lately is kept, and copied for each choice."""

    def __init__(self, text: Text, vocab: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._text, self._vocab = text, vocab
        self._compiling = ThreadPoolExecutor(1, "rayneuron-grammar", initializer=_step_back)
        self._masking = ThreadPoolExecutor(1, "rayneuron-mask")
        self._kept: OrderedDict[bytes, Future[Matcher]] = OrderedDict()
        self._lock = Lock()
        self.counts = dict.fromkeys(("compile_s", "mask_s", "refused", "ended"), 0.0)
        self._missing = _missing(text)
        self._tokenizer: Future[Any] | None = None if self._missing else self._compiling.submit(_tokenizer, text, vocab)

    def check(self, said: StructuredOutputs) -> None:
        """As the protocol's."""
        if self._missing:
            raise RequestError(self._missing, param=said.field)

    def begin(self, said: StructuredOutputs) -> Future[Matcher]:
        """As the protocol's."""
        key = msgspec.msgpack.encode(said)
        with self._lock:
            known = self._kept.get(key)
            if known is None:
                known = self._kept[key] = self._compiling.submit(self._compile, said, len(key))
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        known.add_done_callback(lambda _: self.wake())
        return known

    def aside(self, work: Callable[[], None]) -> Future[None]:
        """As the protocol's."""
        return self._masking.submit(work)

    def close(self) -> None:
        """As the protocol's."""
        for pool in (self._compiling, self._masking):
            pool.shutdown(wait=False, cancel_futures=True)

    def _count(self, what: str, amount: float) -> None:
        with self._lock:
            self.counts[what] += amount

    def _compile(self, said: StructuredOutputs, size_bytes: int) -> Matcher:
        began = time.perf_counter()
        try:
            return self._compiled(said, size_bytes)
        except RequestError:
            self._count("refused", 1)
            raise
        finally:
            self._count("compile_s", time.perf_counter() - began)

    def _compiled(self, said: StructuredOutputs, size_bytes: int) -> Matcher:
        if size_bytes > MAX_BYTES:
            raise _wrong(said, f"it may have at most {MAX_BYTES} bytes, got {size_bytes}")
        from llguidance import LLMatcher, LLParserLimits

        assert self._tokenizer is not None
        try:
            lark = _grammar(said)
        except Exception as wrong:  # of what a client wrote nobody knows all that a translator stumbles over
            raise _wrong(said, str(wrong) or type(wrong).__name__) from wrong
        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        found = LLMatcher(self._tokenizer.result(), lark, log_level=0, limits=limits)
        if found.is_error():
            raise _wrong(said, _why(found))
        first = _Matcher(found, said, self._count, ended=True)
        first.fill(np.zeros((self._vocab + 31) // 32, np.uint32))  # the longest of all, and kept for the copies
        return first


class _Matcher:
    """`engine.grammar.Matcher` of llguidance. In its error state it would allow the end alone, so that is asked after each call.
    `ended`: that is counted already, or no output is."""

    def __init__(self, found: Any, said: StructuredOutputs, count: Callable[[str, float], None], ended: bool = False) -> None:
        self._found, self._said, self._count, self._ended = found, said, count, ended

    def copy(self) -> Matcher:
        return _Matcher(self._found.deep_copy(), self._said, self._count)

    def consume(self, ids: list[int]) -> None:
        self._found.consume_tokens(ids)
        self._sound()

    def fill(self, mask: Mask) -> None:
        began = time.perf_counter()
        self._found.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._count("mask_s", time.perf_counter() - began)
        self._sound()

    def allows(self, ids: list[int]) -> int:
        return int(self._found.validate_tokens(ids))

    def takes(self, token: int) -> bool:
        return bool(self._found.try_consume_tokens([token]) == 1)

    def untake(self) -> None:
        self._found.rollback(1)
        self._sound()

    def forced(self) -> list[int]:
        ids: list[int] = self._found.compute_ff_tokens()
        return ids

    def _sound(self) -> None:
        if self._found.is_error():
            if not self._ended:
                self._ended = True
                self._count("ended", 1)
            raise RequestError(f"{self._said.field}: the output cannot go on: {_why(self._found)}", param=self._said.field)


class _Vocabulary:
    """A tokenizer as llguidance reads it: what the text's own detokenizer makes of each id, so that the two cannot disagree."""

    def __init__(self, text: Text, tokens: list[bytes]) -> None:
        self._text = text
        self.tokens = tokens
        self.special_token_ids = sorted(text.special_ids)
        self.eos_token_id, self.bos_token_id = min(text.eos_ids), None

    def __call__(self, piece: str) -> list[int]:
        if not isinstance(piece, str):
            raise TypeError("text is wanted")  # asked once with bytes, to find out
        return self._text.encode(piece, add_special_tokens=False)


def _step_back() -> None:
    """Have this thread take what the steps' threads leave."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), POLITE)


def _missing(text: Text) -> str:
    """Why nothing can be compiled for a model; "" where it can."""
    if find_spec("llguidance") is None:
        return MISSING
    if text.wordless or not isinstance(text.detokenizer(()), Bytes):
        return "this server cannot constrain its output: its model's tokenizer does not say which bytes its tokens stand for"
    return "" if text.eos_ids else "this server cannot constrain its output: its model names no token that ends a text"


def _tokenizer(text: Text, vocab: int) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [text.token_bytes(token_id) for token_id in range(vocab)]
    return LLTokenizer(TokenizerWrapper(_Vocabulary(text, tokens)), n_vocab=vocab, eos_token=sorted(text.eos_ids), slices=SLICES)


def _grammar(said: StructuredOutputs) -> str:
    """A constraint in llguidance's words. ValueError for one that is none."""
    from llguidance import LLMatcher

    if said.kind == "json":
        schema = json.loads(said.json) if isinstance(said.json, str) else said.json
        return _json(schema, said)
    if said.kind == "json_object":
        return _json({"type": "object"}, said)
    if said.regex is not None:
        return str(LLMatcher.grammar_from_regex(said.regex))
    if said.choice is not None:
        return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in said.choice)
    if said.grammar is not None:
        return _lark(said.grammar)
    return _tags(json.loads(said.structural_tag) if isinstance(said.structural_tag, str) else said.structural_tag)


def _json(schema: Any, said: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a schema is an object, got {type(schema).__name__}")
    schema = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
    compact = {"whitespace_flexible": False}
    wide = {"whitespace_flexible": True, "whitespace_pattern": said.whitespace_pattern or WHITESPACE}
    how: Any = compact if said.disable_any_whitespace else wide
    return str(LLMatcher.grammar_from_json_schema(schema, defaults=how))


def _lark(grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except GbnfToLarkError as wrong:
        raise ValueError(str(wrong)) from wrong


def _tags(said: Any) -> str:
    """vLLM's structural tag: text in which a trigger begins one of the structures, each a tag, a schema and a tag."""
    from llguidance import StructTag

    if not isinstance(said, dict) or not isinstance(said.get("structures"), list) or not isinstance(said.get("triggers"), list):
        raise ValueError("a structural tag is {structures: [{begin, schema, end}, ...], triggers: [...]}")
    tags = []
    for each in said["structures"]:
        if not (isinstance(each, dict) and isinstance(each.get("begin"), str) and isinstance(each.get("schema"), (dict, bool))):
            raise ValueError("each of structures is {begin: text, schema: object, end: text}")
        trigger = next((t for t in said["triggers"] if isinstance(t, str) and t and each["begin"].startswith(t)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {each['begin']!r}")
        schema = each["schema"] if isinstance(each["schema"], dict) else {}
        tags.append(StructTag(trigger=trigger, begin=each["begin"], grammar=schema, end=each.get("end") or ""))
    return str(StructTag.to_grammar(tags, assume_special=False))


def _why(found: Any) -> str:
    """What llguidance says is wrong: its first line, and of a regex the reason, which stands further down."""
    first, *more = str(found.get_error()).strip().splitlines() or [""]
    reason = "".join(line.removeprefix("error:") for line in more if line.startswith("error:"))
    lenient = '; leave them out, or write "x-guidance": {"lenient": true} into the schema, which passes over them'
    return first + reason + (lenient if first.startswith("Unimplemented keys") else "")


def _wrong(said: StructuredOutputs, why: str) -> RequestError:
    return RequestError(f"{said.field}: no output could be held to this {said.kind}: {why}", param=said.field)
