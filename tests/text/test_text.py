"""Tokenizer, chat template, special tokens: equal to transformers, never the network, EOS from every source."""

# ruff: noqa: F401, F811  (fixtures are imported, then named as arguments)

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rayneuron import models
from rayneuron.errors import CheckpointError, ConfigError, RequestError
from rayneuron.text.text import Text
from tests.api import spelling
from tests.api.conftest import byte_fallback, byte_level, text, word_pieces

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "สวัสดี 👩‍👩‍👧 <|im_end|> 你好"}]


@pytest.mark.parametrize("kind", [spelling.byte_level, spelling.byte_fallback, spelling.word_pieces])
def test_equals_transformers(kind: Any, tmp_path: Path) -> None:
    """Ids of texts and chats, and whole decodes, are what transformers gives."""
    ours, theirs = Text(kind(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for sample in spelling.CORPUS:
        for special in (True, False):
            ids = theirs.encode(sample, add_special_tokens=special)
            assert ours.encode(sample, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    for generate in (True, False):
        told = theirs.apply_chat_template(CHAT, add_generation_prompt=generate, return_dict=False)
        assert ours.chat(CHAT, add_generation_prompt=generate) == told


def test_the_demo_model_equals_transformers(smollm2: Path) -> None:
    ours, theirs = Text(smollm2), AutoTokenizer.from_pretrained(smollm2)
    for sample in spelling.CORPUS:
        ids = theirs.encode(sample)
        assert ours.encode(sample) == ids
        words = ours.detokenizer([], True)
        assert "".join(map(words.push, ids)) + words.flush() == theirs.decode(ids, skip_special_tokens=True) == sample
    assert ours.chat(CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.eos_ids == {theirs.convert_tokens_to_ids("<|im_end|>")}
    assert ours.vocab_size == json.loads((smollm2 / "config.json").read_text())["vocab_size"]


CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", None)


@pytest.mark.parametrize("model_type", sorted(models.FAMILIES))
def test_no_class_changes_what_a_tokenizer_json_says(model_type: str, tmp_path: Path) -> None:
    """For every family and class: ids of the file, the names and the template beside it. With the generic class transformers agrees."""
    spelling.byte_level(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs, named = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for kind in CLASSES:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": kind, "add_bos_token": False}))
        ours = Text(tmp_path)
        assert ours.tokenizer.names == named.special_tokens_map and ours.config["chat_template"] == named.chat_template
        for sample in spelling.CORPUS:
            assert ours.encode(sample) == theirs.encode(sample).ids == named.encode(sample)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spelling.byte_level(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert Text(tmp_path).encode("hello")
    with pytest.raises(CheckpointError, match="is not a directory"):
        Text("meta-llama/Llama-3-8B")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="no tokenizer could be read"):
        Text(empty)


@pytest.mark.parametrize(
    ("config", "generation", "words", "expected"),
    [
        ({"eos_token_id": 1}, None, {}, {1, 2}),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 7}, {}, {2, 3, 4, 7}),
        ({}, {"eos_token_id": [4, 2]}, {"eos_token": None}, {2, 4}),
        ({"text_config": {"eos_token_id": 9}}, None, {"eos_token": None}, {9}),
        ({"eos_token_id": None}, {}, {"eos_token": None}, set()),
        ({}, {"eos_token_id": True}, {}, {2}),
    ],
)
def test_eos_is_the_union_of_all_sources(tmp_path: Path, config: Any, generation: Any, words: Any, expected: set[int]) -> None:
    assert Text(spelling.byte_level(tmp_path, config=config, generation=generation, words=words)).eos_ids == expected


def test_an_architecture_transformers_does_not_know(tmp_path: Path) -> None:
    """Our own families may be older or newer than the installed transformers; the tokenizer opens all the same."""
    assert Text(spelling.byte_level(tmp_path, config={"model_type": "gpt_nova", "architectures": ["GPTNovaForCausalLM"]})).encode("hello")


def test_one_bos(text: Text) -> None:
    """A text that already begins with BOS, a chat template with BOS, and a plain text each give exactly one."""
    bos = text.tokenizer.id_of("bos_token")
    plain, marked = text.encode("hello"), text.encode("<s>hello")
    assert plain.count(bos) == marked.count(bos) == 1
    assert marked[0] == bos
    assert text.encode("<s>hello", add_special_tokens=False).count(bos) == 1
    assert bos not in text.encode("hello", add_special_tokens=False)
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert text.chat(CHAT[:1], chat_template=template).count(bos) == 1
    assert text.chat(CHAT[:1], chat_template=template, add_special_tokens=True).count(bos) == 1
    assert text.chat(CHAT[:1]).count(bos) == 0
    assert text.encode("<s><s>hello", add_special_tokens=False).count(bos) == 2, "what the caller wrote himself stays"


def test_a_saved_truncation_is_not_applied(tmp_path: Path) -> None:
    spelling.byte_level(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    text = Text(tmp_path)
    assert text.decode(text.encode("a" * 100)) == "a" * 100


def test_chat_templates(tmp_path: Path) -> None:
    path = spelling.byte_level(tmp_path, words={"chat_template": None})
    with pytest.raises(RequestError, match="no chat template") as caught:
        Text(path).chat(CHAT)
    assert caught.value.param == "messages"
    given = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ tail }}"
    (tmp_path / "own.jinja").write_text(given)
    for source in (given, tmp_path / "own.jinja", str(tmp_path / "own.jinja")):
        text = Text(path, chat_template=source)
        assert text.decode(text.chat(CHAT[:1], tail="!")) == "[system]Be brief.!"
        assert text.config["chat_template"] == given
    with pytest.raises(ConfigError, match=r"neither a template nor a readable file"):
        Text(path, chat_template="missing.jinja")


def test_a_refusing_template_is_the_callers_error(byte_level: Text) -> None:
    with pytest.raises(RequestError, match="unknown role wizard") as caught:
        byte_level.chat([{"role": "wizard", "content": "x"}])
    assert caught.value.param == "messages"
    for bad in ("{% for %}", "{{ messages[0].x.y.z }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"):
        with pytest.raises(RequestError) as caught:
            byte_level.chat(CHAT, chat_template=bad)
        assert caught.value.param == "chat_template"


def test_continue_final_message(byte_level: Text) -> None:
    told = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two"}]
    rendered = byte_level.decode(byte_level.chat(told, add_generation_prompt=False, continue_final_message=True), skip_special_tokens=False)
    assert rendered.endswith("assistant\none, two")


class Counted:
    """A backend that counts the characters it is given."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend, self.characters = backend, 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.backend.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@pytest.mark.parametrize("kind", [spelling.byte_level, spelling.byte_fallback, spelling.word_pieces])
def test_a_text_that_cannot_fit_is_hardly_tokenised(kind: Any, tmp_path: Path) -> None:
    """Nothing of it where no token is that long, else a beginning that settles it; a text near the limit is counted to the end."""
    text, limit = Text(kind(tmp_path)), 64
    text._backend = counted = Counted(text._backend)  # type: ignore[assignment]
    for told in ("a " * 10**6, "水" * 10**6, " " * 10**6 + "a b , " * 200):
        counted.characters = 0
        if told[0] == "a" or kind is spelling.byte_level:  # elsewhere they may be one unknown word, or nothing
            with pytest.raises(RequestError, match="more than 64 tokens") as caught:
                text.chat([{"role": "user", "content": told}], limit=limit)
            assert caught.value.param == "input_tokens"
            with pytest.raises(RequestError, match="more than 64 tokens"):
                text.encode(told, limit=limit)
            assert counted.characters <= (2 * 16 * limit if kind is spelling.word_pieces else 0)
    near = "hello world . " * 30
    assert text.encode(near, limit=limit) == text.encode(near)
    told = "hello world , un " * 2000
    for side, kept in (("left", slice(-limit, None)), ("right", slice(limit))):
        assert text.encode(told, limit=limit, side=side)[kept] == text.encode(told)[kept]


def test_bytes_without_a_token_count_for_nothing(smollm2: Path) -> None:
    """SmolLM2 has no token for some control characters: a text of a million of them and one word is short."""
    text = Text(smollm2)
    assert text.encode("\x04" * 10**6 + "hello", limit=64) == text.encode("hello")
    with pytest.raises(RequestError, match="more than 64 tokens"):
        text.encode("\x04 " * 10**6, limit=64)


def test_other_threads_run_while_a_text_is_tokenised(smollm2: Path) -> None:
    """The interpreter lock is given up: this thread does not stand still for a good part of the time it takes, unless all of the machine
    does, which is not each time."""
    text, told = Text(smollm2), "The quick brown fox 你好 " * 20_000
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            reading = pool.submit(text.encode, told)
            longest, before = 0.0, time.perf_counter()
            started = before
            while not reading.done():
                now = time.perf_counter()
                longest, before = max(longest, now - before), now
            took = time.perf_counter() - started
            if longest < took / 3:
                break
    assert len(reading.result()) > 20_000 and longest < took / 3, (longest, took)


def test_lone_surrogates_are_refused(text: Text) -> None:
    with pytest.raises(RequestError, match="lone surrogates"):
        text.encode("a\ud800b")


def test_bytes_of_every_token(text: Text) -> None:
    """The table of bytes, token by token, against the tokenizer's own decoder: every token between two letters."""
    letter = text.encode("x", add_special_tokens=False)[-1]
    for token_id in range(text.tokenizer.backend.get_vocab_size()):
        spelled = text.token_bytes(token_id)
        whole = text.decode([letter, token_id, letter], skip_special_tokens=False)
        assert (b"x" + spelled + b"x").decode("utf-8", "replace") == whole.lstrip(" "), token_id
        assert text.token(token_id) == spelled.decode("utf-8", "replace")
    assert text.token_bytes(10**6) == b""


def test_tokenizer_config_is_plain(tmp_path: Path) -> None:
    """Named tokens written as objects come out as strings, as lm-eval wants them."""
    as_object = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "__type": "AddedToken"}
    config = Text(spelling.byte_level(tmp_path, words={"eos_token": as_object})).config
    assert (config["eos_token"], config["bos_token"], config["pad_token"]) == ("</s>", "<s>", None)
    assert config["chat_template"] == spelling.CHATML
    json.dumps(config)
