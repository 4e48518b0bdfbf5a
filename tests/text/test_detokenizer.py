"""Incremental text: detokenizer, stop strings and Assembler against naive references that see the whole text at once."""

# ruff: noqa: F401, F811  (fixtures are imported, then named as arguments)

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayneuron.errors import RequestError
from rayneuron.text.assembler import Assembler
from rayneuron.text.stops import Stops, StopStrings
from rayneuron.text.text import Text
from rayneuron.types import Request, SamplingParams, TokenDelta, TokenLogprobs
from tests.api import playing, spelling
from tests.api.conftest import byte_fallback, byte_level, text, word_pieces
from tests.drawn import examples

RELAXED = examples(300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def streamed(text: Text, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True) -> list[str]:
    words = text.detokenizer(prompt, skip)
    return [*(words.push(token_id) for token_id in ids), words.flush()]


def spelled(text: Text, ids: Sequence[int], skip: bool) -> bytes:
    """The bytes of tokens, read off the vocabulary by hand: GPT-2's alphabet or Llama's <0x..> and ▁."""
    backend = text.tokenizer.backend
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(rest)}
    joined = b""
    for token_id in ids:
        name = backend.id_to_token(token_id)
        if skip and name in spelling.SPECIAL:
            continue
        if "ByteLevel" in repr(backend.decoder):
            joined += bytes(alphabet[char] for char in name)
        else:
            joined += bytes.fromhex(name[3:5]) if name.startswith("<0x") else name.replace("▁", " ").encode()
    return joined


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("sample", spelling.CORPUS)
def test_corpus_streams_whole(text: Text, sample: str, skip: bool) -> None:
    """Token by token the corpus comes out as it went in, and no piece ever holds half a character."""
    ids = text.encode(sample, add_special_tokens=False)
    pieces = streamed(text, ids, skip=skip)
    assert "".join(pieces) == text.decode(ids, skip_special_tokens=skip) == sample
    if "\ufffd" not in sample:
        assert all("\ufffd" not in piece for piece in pieces)
    space = " " if "▁" in text.tokenizer.backend.get_vocab() else ""
    assert "".join(streamed(text, ids, text.encode("a prompt"), skip)) == space + sample, "after a prompt a leading space stays"


@RELAXED
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_to_their_bytes(byte_level: Text, byte_fallback: Text, data: st.DataObject, skip: bool) -> None:
    """Random ids, most of them invalid UTF-8: the join is what all bytes decode to at once, and the tokenizer's own where it agrees."""
    for kind in (byte_level, byte_fallback):
        ids = data.draw(st.lists(st.integers(0, kind.tokenizer.backend.get_vocab_size() - 1), max_size=24))
        whole = spelled(kind, ids, skip).decode("utf-8", "replace")
        joined = "".join(streamed(kind, ids, skip=skip))
        assert joined == (whole if kind is byte_level else whole.removeprefix(" "))
        if "\ufffd" not in whole or kind is byte_level:  # byte fallback itself turns a whole run to U+FFFD when any byte of it is bad
            assert joined == kind.decode(ids, skip_special_tokens=skip)


@RELAXED
@given(data=st.data())
def test_window_streams_to_the_whole(word_pieces: Text, data: st.DataObject) -> None:
    """A tokenizer without a byte table, over more tokens than one window holds."""
    ids = data.draw(st.lists(st.integers(0, word_pieces.vocab_size - 1), max_size=70))
    for skip in (True, False):
        assert "".join(streamed(word_pieces, ids, skip=skip)) == word_pieces.decode(ids, skip_special_tokens=skip)


def test_window_does_not_halve_characters(byte_level: Text) -> None:
    """The window over a tokenizer that does make half characters."""
    from rayneuron.text.detokenizer import Window

    for sample in spelling.CORPUS[:-1]:
        ids = byte_level.encode(sample * 5, add_special_tokens=False)
        words = Window(byte_level.decode, [])
        pieces = [words.push(token_id) for token_id in ids]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) + words.flush() == sample * 5


def test_prompt_that_ends_inside_a_character(text: Text) -> None:
    """The output completes the character; none of the prompt is sent again; a completion that fails is not blamed on the output."""
    first, second, third = _byte_ids(text, "水")
    after = text.encode("x", add_special_tokens=False)[-1:]
    prompt = [*text.encode("The sea: ", add_special_tokens=False), first, second]
    assert streamed(text, [third, *after], prompt) == ["水", "x", ""]
    assert streamed(text, after, prompt) == ["x", ""]
    assert streamed(text, [], prompt) == [""]
    assert streamed(text, [second, third, *after], prompt[:-1]) == ["", "水", "x", ""]
    assert streamed(text, [second], prompt[:-1]) == ["", "\ufffd"]


def _byte_ids(text: Text, char: str) -> list[int]:
    """One token a byte."""
    singles = {text.token_bytes(token_id): token_id for token_id in reversed(range(text.vocab_size))}
    return [singles[bytes([byte])] for byte in char.encode()]


def test_special_tokens(text: Text) -> None:
    """Special tokens are left out or kept as asked; an added token that is not special always stays."""
    ids = [text.tokenizer.backend.token_to_id(name) for name in ("<|im_start|>", spelling.KEPT, "<|im_end|>", "<s>")]
    assert "".join(streamed(text, ids)) == spelling.KEPT
    assert "".join(streamed(text, ids, skip=False)) == f"<|im_start|>{spelling.KEPT}<|im_end|><s>"


def reference(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None, int]:
    """Whole text, then look: what a client gets, the stop that ended it, and how many characters it took."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop, end
    return text, None, len(text)


LETTERS = st.text("ab\u6c34", max_size=14)


@examples(1000)
@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text("ab\u6c34", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stops_equal_the_naive_search(pieces: list[str], stops: list[str], include: bool) -> None:
    """Whatever the pieces: the same text and stop as on the whole, nothing sent that could begin a stop, nothing withheld beyond that."""
    scanner, sent, seen, found = Stops(StopStrings(stops), include), "", "", None
    for piece in pieces:
        out, found = scanner.push(piece)
        sent, seen = sent + out, seen + piece
        if found is not None:
            break
        risky = [seen[-size:] for size in range(1, len(seen) + 1) if any(stop.startswith(seen[-size:]) for stop in stops)]
        withheld = "" if include else max(risky, key=len, default="")
        assert sent + withheld == seen
    else:
        sent += scanner.flush()
    assert (sent, found) == reference("".join(pieces), stops, include)[:2]


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "found"),
    [
        (["AB", "CDE", "FGH", "IJK"], ("DEFGHIJ",), "ABC", "DEFGHIJ"),
        (["xDE", "FGX", "y"], ("DEFGHIJ",), "xDEFGXy", None),
        (["one\n", "\n", "two"], ("\n\n", "two"), "one", "\n\n"),
        (["aab", "aac"], ("aac",), "aab", "aac"),
        (["THE END"], ("END", "THE END"), "", "THE END"),
        (["abcdX"], ("abcdX", "bc"), "a", "bc"),
        (["", "x", ""], ("x",), "", "x"),
    ],
)
def test_stop_examples(pieces: list[str], stops: tuple[str, ...], expected: str, found: str | None) -> None:
    scanner, sent, hit = Stops(StopStrings(stops)), "", None
    for piece in pieces:
        out, hit = scanner.push(piece)
        sent += out
        if hit is not None:
            break
    assert (sent + ("" if hit else scanner.flush()), hit) == (expected, found)


def test_stop_strings_cost_what_they_are_long() -> None:
    """A state a character, however the stop string repeats itself; choices share them. (Every proper prefix kept: 1.8 GB for this one.)"""
    tracemalloc.start()
    stops = StopStrings(["ab" * 30_000, "ab" * 20_000 + "c"])
    scanners = [Stops(stops) for _ in range(128)]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(stops.depths) == 60_000 + 1 + 1 and held < 64 * 2**20
    for scanner in scanners[:2]:
        assert scanner.push("ab" * 25_000) == ("", None)
        assert scanner.push("c!") == ("ab" * 5_000, "ab" * 20_000 + "c")


def test_stop_strings_have_a_limit() -> None:
    assert SamplingParams(stop=("a" * 2048, "b" * 2048)).stop
    with pytest.raises(RequestError, match="at most 4096 characters in all, got 4097") as caught:
        SamplingParams(stop=("a" * 2048, "b" * 2049))
    assert caught.value.param == "stop"


def request_for(text: Text, prompt: str = "p", **words: object) -> Request:
    return Request(id="r-0", prompt_ids=text.encode(prompt), params=SamplingParams(**({"max_tokens": None} | words)))  # type: ignore[arg-type]


def outcome(text: Text, request: Request, ids: Sequence[int], sizes: list[int], **words: object) -> dict[str, object]:
    made = playing.assemble(request, text, playing.play(request, ids, sizes, **words))  # type: ignore[arg-type]
    assert [delta.finish_reason is not None for delta in made] == [False] * (len(made) - 1) + [True]
    assert all(delta.text for delta in made[:-1]), "an empty delta before the last"
    last = made[-1]
    assert last.usage is not None and last.usage.completion_tokens == sum(len(delta.token_ids) for delta in made)
    return {
        "text": "".join(delta.text for delta in made),
        "ids": [token_id for delta in made for token_id in delta.token_ids],
        "logprobs": [entry for delta in made for entry in delta.logprobs or []],
        "finish": (last.finish_reason, last.stop_reason),
        "usage": last.usage,
    }


@pytest.mark.parametrize("sample", ["hi 👩‍👩‍👧!", "안녕 x", "น้ำ", "क्षत्रिय", "ends in 水"])
@pytest.mark.parametrize("stops", [(), ("!",), ("👧", "zz"), ("녕 x",), ("ั", "้"), ("in ", "n 水")])
@pytest.mark.parametrize("include", [False, True])
def test_every_cut_gives_the_same(text: Text, sample: str, stops: tuple[str, ...], include: bool) -> None:
    """All the ways to cut up to nine tokens into steps give one outcome: that of the whole text searched at once."""
    ids = text.encode(sample, add_special_tokens=False)[-9:]
    request = request_for(text, stop=stops, include_stop_str_in_output=include, logprobs=1)
    whole = "".join(streamed(text, ids, request.prompt_ids))
    expected, stop, characters = reference(whole, stops, include)
    counted = len(ids)
    if stop is not None:
        parts = streamed(text, ids, request.prompt_ids)
        counted = next(n for n in range(1, len(ids) + 1) if len("".join(parts[:n])) >= characters)
    for sizes in playing.cuts(len(ids)):
        got = outcome(text, request, ids, sizes)
        assert got["text"] == expected
        assert got["ids"] == ids[:counted]
        assert got["logprobs"] == [playing.probability(token_id, 1, 1000) for token_id in ids[:counted]]
        assert got["finish"] == (("stop", stop) if stop is not None else ("length", None))
        assert got["usage"] is not None and got["usage"].prompt_tokens == len(request.prompt_ids)  # type: ignore[attr-defined]


def test_after_a_stop_string_nothing_follows(text: Text) -> None:
    request = request_for(text, stop=("b",))
    assembler = Assembler(request, text)
    ids = text.encode("abc", add_special_tokens=False)
    made = [assembler.push(delta) for delta in playing.play(request, [*ids, *ids], [1] * (2 * len(ids)))]
    place = next(n for n, delta in enumerate(made) if delta is not None and delta.finish_reason == "stop")
    assert made[place + 1 :] == [None] * (len(made) - place - 1) and place < len(made) - 1


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_end_of_sequence(text: Text, skip: bool, include: bool) -> None:
    """EOS ends with reason stop, is counted, and is not in the text, unless include_stop_str_in_output asks for it with skipping off."""
    eos, request = text.tokenizer.id_of("eos_token"), request_for(text, skip_special_tokens=skip, include_stop_str_in_output=include)
    shown = "</s>" if include and not skip else ""
    first = outcome(text, request, [eos], [1], finish="stop", eos=True)
    assert (first["text"], first["finish"], first["usage"].completion_tokens) == (shown, ("stop", None), 1)  # type: ignore[attr-defined]
    ids = [*text.encode("ab", add_special_tokens=False), eos]
    for sizes in playing.cuts(len(ids)):
        got = outcome(text, request, ids, sizes, finish="stop", eos=True)
        assert (str(got["text"]).lstrip(), got["ids"], got["finish"]) == ("ab" + shown, ids, ("stop", None))


def test_stop_token_ids(text: Text) -> None:
    """A stop token's text is not returned, its id is the reason; in the middle of a character the bytes before it become U+FFFD."""
    ids = text.encode("水", add_special_tokens=False)[-3:]
    stop = text.encode("x", add_special_tokens=False)[-1]
    request = request_for(text, stop_token_ids=(stop,))
    got = outcome(text, request, [*_byte_ids(text, "水")[:2], stop], [1, 2], finish="stop", stop_token=stop)
    assert (got["text"], got["finish"]) == ("\ufffd", ("stop", stop)) and ids
    shown = request_for(text, stop_token_ids=(stop,), include_stop_str_in_output=True)
    assert outcome(text, shown, [stop], [1], finish="stop", stop_token=stop)["text"] == text.token(stop)


@pytest.mark.parametrize(
    ("finish", "eos", "token", "stops", "expected"),
    [
        ("length", False, None, ("q",), ("length", None)),
        ("length", False, None, ("b",), ("stop", "b")),
        ("stop", True, None, ("z",), ("stop", None)),
        ("abort", False, None, (), ("abort", None)),
        ("error", False, None, (), ("error", None)),
    ],
)
def test_reasons(byte_level: Text, finish: str, eos: bool, token: int | None, stops: tuple[str, ...], expected: object) -> None:
    """The reason is right exactly once, also when the last token has no text and when limit and stop string meet at one token."""
    ids = byte_level.encode("ab", add_special_tokens=False) + ([2] if eos else [])
    request = request_for(byte_level, stop=stops)
    for sizes in playing.cuts(len(ids)):
        for steps in (sizes, [*sizes, 0]) if not eos else (sizes,):
            assert outcome(byte_level, request, ids, steps, finish=finish, eos=eos, stop_token=token)["finish"] == expected


def test_min_tokens_disarms_stop_strings(byte_level: Text) -> None:
    """No stop string counts before min_tokens tokens; one that is complete after them does, even if it began before."""
    ids = byte_level.encode("b", add_special_tokens=False) * 5
    for sizes in playing.cuts(5):
        got = outcome(byte_level, request_for(byte_level, stop=("bb",), min_tokens=3), ids, sizes)
        assert (got["text"], got["finish"], len(got["ids"])) == ("bb", ("stop", "bb"), 4)  # type: ignore[arg-type]


def test_choices_do_not_mix(byte_level: Text) -> None:
    """Two choices of one request arrive interleaved, one inside a character."""
    request = request_for(byte_level, n=2, temperature=1.0)
    assembler = Assembler(request, byte_level)
    first, other = _byte_ids(byte_level, "水"), byte_level.encode("ok", add_special_tokens=False)
    made = [
        assembler.push(TokenDelta("r-0", 0, first[:2])),
        assembler.push(TokenDelta("r-0", 1, other, finish_reason="length")),
        assembler.push(TokenDelta("r-0", 0, first[2:], finish_reason="length")),
    ]
    assert [(d.index, d.text, d.token_ids) if d else None for d in made] == [None, (1, "ok", other), (0, "水", first)]


def test_prompt_logprobs_are_not_withheld(byte_level: Text) -> None:
    request = request_for(byte_level, stop=("ab",), prompt_logprobs=0)
    told: list[TokenLogprobs | None] = [None, TokenLogprobs(5, -1.0, 1, ())]
    delta = Assembler(request, byte_level).push(TokenDelta("r-0", 0, byte_level.encode("a", False), prompt_logprobs=told))
    assert delta is not None and (delta.text, delta.prompt_logprobs) == ("", told)
