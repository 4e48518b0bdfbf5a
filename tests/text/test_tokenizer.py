"""Tokenizers of every kind: ids and streamed text equal to the tokenizers library's, whatever class stands beside the file."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rayneuron.errors import CheckpointError
from rayneuron.text.text import Text
from tests.api import spelling

GPT_4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CLASSES = (
    *("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast"),
    *("Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizerFast", "T5Tokenizer", "BertTokenizer", "GPTNeoXTokenizerFast"),
    *("CodeGenTokenizer", "BloomTokenizerFast", "CohereTokenizerFast", "OwnTokenizer", None),
)
MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2", "gpt_neox", "gptj", "opt", "bloom", "phi3", "own", None)
PIECES = (
    *("the", "The", "fox", " ", "  ", "\n", "\n\n", "\t", " \r\n", "a", "Z", "0", "12", "3456789", ".", ", ", "!?", "'s", "don't", "_"),
    *("<", ">", "水", "你好", "世界。", "สวัสดี", "ज़िंदगी", "안녕", "각", "é", "e\u0301", "ﬁ", "①", "Ａ", "ǆ", "ß", "İ", "🙂", "👩‍👩‍👧"),
    *("🏴‍☠️", "𝔘"),
    *("\u200b", "\ufeff", "\u00a0", "\u3000", "\ufffd", "▁", "Ġ", "<0x41>", "\x00", "\x7f", "مرحبا", "שלום", "<s>", "</s>", "<unk>"),
    *("<|im_end|>", "<tool>", "</w>", "[L]", "[R]", "[LR]", "[W]", "[n]", "[N]", "##able", "[CLS]"),
)


def trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([*spelling.CORPUS, "".join(PIECES), " ".join(PIECES)], trainer)
    return tokenizer


def bpe(size: int = 500, **parts: Any) -> Tokenizer:
    """Byte-level BPE."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(spelling.SPECIAL), initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), trainer, decoder=decoders.ByteLevel(), **parts)


def unigram(scheme: str, **parts: Any) -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=list(spelling.SPECIAL), unk_token="<unk>", show_progress=False)
    space = {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme=scheme), "decoder": decoders.Metaspace(prepend_scheme=scheme)}
    return trained(models.Unigram(), trainer, **space, **parts)


def gemma() -> Tokenizer:
    """Llama's vocabulary, Gemma's way with spaces."""
    tokenizer = spelling.byte_fallback_tokenizer()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def word_piece(**parts: Any) -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", "[CLS]", "[SEP]"], show_progress=False)
    words = {"pre_tokenizer": pre_tokenizers.BertPreTokenizer(), "decoder": decoders.WordPiece(prefix="##", cleanup=False)}
    return trained(models.WordPiece(unk_token="<unk>"), trainer, **words | parts)


def suffixed() -> Tokenizer:
    """GPT-1's kind: </w> ends a word."""
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False)
    parts = {"pre_tokenizer": pre_tokenizers.WhitespaceSplit(), "decoder": decoders.BPEDecoder(), "normalizer": normalizers.Lowercase()}
    return trained(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"), trainer, **parts)


def word_level() -> Tokenizer:
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>"], show_progress=False)
    return trained(models.WordLevel(unk_token="<unk>"), trainer, pre_tokenizer=pre_tokenizers.Whitespace())


def byte_level(regex: bool = True, prefix: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level(regex=False)])


def deepseek() -> Any:
    steps = [pre_tokenizers.Split(Regex("[\r\n]"), "isolated"), pre_tokenizers.Digits(individual_digits=True)]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.Punctuation(), byte_level(regex=False)])


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: bpe(pre_tokenizer=byte_level(), post_processor=processors.ByteLevel(trim_offsets=True)),
    "gpt-2 with a space first": lambda: bpe(pre_tokenizer=byte_level(prefix=True)),
    "gpt-4": lambda: bpe(pre_tokenizer=split(GPT_4)),
    "qwen": lambda: bpe(pre_tokenizer=split(GPT_4), normalizer=normalizers.NFC()),
    "deepseek": lambda: bpe(pre_tokenizer=deepseek()),
    "byte level, NFKC and lower case": lambda: bpe(
        pre_tokenizer=byte_level(), normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "llama": spelling.byte_fallback_tokenizer,
    "gemma": gemma,
    "unigram": lambda: unigram("always", normalizer=normalizers.NFKC()),
    "unigram, first word": lambda: unigram("first"),
    "unigram, no space first": lambda: unigram("never", normalizer=normalizers.Replace(Regex(" {2,}"), " ")),
    "bert": lambda: word_piece(normalizer=normalizers.BertNormalizer(lowercase=True)),
    "bert, cleaned up": lambda: word_piece(decoder=decoders.WordPiece(prefix="##", cleanup=True)),
    "gpt-1": suffixed,
    "words": word_level,
}  # fmt: skip


def finish(tokenizer: Tokenizer, number: int) -> Tokenizer:
    """Added tokens of every sort, and one of the ways to begin and end a text."""
    special = [AddedToken(name, special=True, normalized=False) for name in spelling.SPECIAL]
    tokenizer.add_special_tokens([*special, AddedToken("[L]", lstrip=True), AddedToken("[R]", rstrip=True)])
    tokenizer.add_tokens([AddedToken("[LR]", lstrip=True, rstrip=True), AddedToken("[W]", single_word=True)])
    tokenizer.add_tokens([AddedToken("[n]", normalized=False), AddedToken("[N]", normalized=True), spelling.KEPT])
    bos, eos = ((name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>"))
    ways = [None, ("<s> $A", [bos]), ("<s> $A </s>", [bos, eos]), ("$A </s>", [eos])]
    if (way := ways[number % 4]) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=way[0], pair=None, special_tokens=way[1])
    return tokenizer


def strings(seed: int) -> Iterator[str]:
    drawn = random.Random(seed)
    yield from ("", " ", *spelling.CORPUS, *PIECES)
    while True:
        text = "".join(drawn.choice(PIECES) for _ in range(drawn.randrange(1, 24)))
        yield text + chr(drawn.choice((drawn.randrange(0x20, 0xD800), drawn.randrange(0xE000, 0x110000)))) * drawn.randrange(2)


def same_ids(folder: Path, kind: str, count: int) -> None:
    """`count` strings under every class and model type in turn, a dozen for each."""
    finish(KINDS[kind](), list(KINDS).index(kind)).save(str(folder / "tokenizer.json"))
    theirs, told = Tokenizer.from_file(str(folder / "tokenizer.json")), strings(len(kind))
    spellings = itertools.cycle(itertools.product(CLASSES, MODEL_TYPES, (True, False, None)))
    batch = 12
    for _ in range(0, count, batch):
        named, model_type, bos = next(spellings)
        for _ in range(16):  # the rows of the product in leaps, so that a short run meets all of them
            next(spellings)
        config = {"tokenizer_class": named, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": bos}
        (folder / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
        ours = Text(folder)
        for text in itertools.islice(told, batch):
            for special in (True, False):
                ids = theirs.encode(text, add_special_tokens=special).ids
                if special and ids[:2] == [theirs.token_to_id("<s>")] * 2 and text.startswith("<s>"):
                    ids = ids[1:]  # the one exception: a text that brings its own BOS gets no second
                assert ours.encode(text, add_special_tokens=special) == ids, (named, model_type, text)
                words = ours.detokenizer([], skip_special_tokens=special)
                streamed = "".join(map(words.push, ids)) + words.flush()
                assert streamed == ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special), (kind, text)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_streams_equal_the_library(kind: str, tmp_path: Path) -> None:
    same_ids(tmp_path, kind, 240)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_streams_equal_the_library_at_length(kind: str, tmp_path: Path) -> None:
    same_ids(tmp_path, kind, 1400)  # 21,000 of all kinds


NAMED = {"content": "<|new|>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False, "special": True}
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "names as objects": {"tokenizer_config.json": {"bos_token": {"__type": "AddedToken", **NAMED, "content": "<s>"}, "eos_token": "</s>"}},
    "an older map": {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": {**NAMED, "content": "<|im_end|>"}, "pad_token": "</s>"}},
    "a map that no longer counts": {
        "tokenizer_config.json": {"added_tokens_decoder": {"1": {**NAMED, "content": "<s>", "rstrip": False}}, "eos_token": "</s>"},
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
    },
    "a name the file does not hold": {"tokenizer_config.json": {"eos_token": "<|new|>", "bos_token": None, "pad_token": "the"}},
    "listed tokens the file does not hold": {
        "tokenizer_config.json": {"added_tokens_decoder": {"421": NAMED, "422": {**NAMED, "content": "<|b|>"}}}
    },
    "an older list": {"added_tokens.json": {"<|b|>": 422, "<|new|>": 421}, "special_tokens_map.json": {"eos_token": "<|new|>"}},
    "more special ones": {"tokenizer_config.json": {"additional_special_tokens": ["<|new|>", "<|b|>"]}},
    "split special tokens": {"tokenizer_config.json": {"bos_token": "<s>", "split_special_tokens": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_the_file_counts_as_in_transformers(name: str, tmp_path: Path) -> None:
    """Names and tokens the file does not know, from every file that may hold them: names, vocabulary, ids and texts equal."""
    spelling.byte_level(tmp_path, config={"vocab_size": 512})
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for file, content in BESIDE[name].items():
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"} if file == "tokenizer_config.json" else {}
        (tmp_path / file).write_text(json.dumps({**kind, **content}))
    if "tokenizer_config.json" not in BESIDE[name]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    ours, theirs = Text(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.tokenizer.names == theirs.special_tokens_map
    assert ours.tokenizer.backend.get_vocab() == theirs.get_vocab()
    for text in ("<s>a <|new|>  b<|b|>the</s>", "<|im_end|> <|new|>"):
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special)[-5:] == ids[-5:] and ours.decode(ids, special) == theirs.decode(ids, special)


def test_tokens_beyond_the_rows_of_the_model_are_not_added(tmp_path: Path) -> None:
    rows = spelling.byte_level_tokenizer().get_vocab_size()
    spelling.byte_level(tmp_path, config={"vocab_size": rows}, words={"pad_token": "[PAD]"})
    text = Text(tmp_path)
    assert text.tokenizer.names["pad_token"] == "[PAD]" and max(text.encode("[PAD]")) < rows


def test_a_class_brings_its_tokens_where_no_file_names_them(tmp_path: Path) -> None:
    """GPT-2's first repository: tokenizer.json and config.json alone."""
    spelling.byte_level(tmp_path, config={"model_type": "gpt2", "bos_token_id": 2, "eos_token_id": 2})
    (tmp_path / "tokenizer_config.json").unlink()
    assert Text(tmp_path).tokenizer.names == {"bos_token": "</s>", "eos_token": "</s>"}


def test_files_of_another_kind_are_converted(tmp_path: Path) -> None:
    """vocab.json and merges.txt: transformers builds the tokenizer, ids and names are its own."""
    bpe(pre_tokenizer=byte_level()).model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    named = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    ours, theirs = Text(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.tokenizer.names == theirs.special_tokens_map
    for text in spelling.CORPUS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json"),
        ("tokenizer.json", "[]", r"tokenizer\.json"),
        ("tokenizer_config.json", "[]", "must hold a JSON object, not list"),
        ("config.json", "5", "must hold a JSON object, not int"),
        ("generation_config.json", "[]", "must hold a JSON object, not list"),
        ("tokenizer_config.json", '{"eos_token": {"text": "x"}}', r"tokens named beside .*tokenizer\.json cannot be read"),
        ("added_tokens.json", '{"a": 5, "b": "x"}', r"tokens named beside .*tokenizer\.json cannot be read"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "a list of {name, template}"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: str, said: str) -> None:
    spelling.byte_level(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=said):
        Text(tmp_path)


def test_a_check_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    spelling.byte_level(tmp_path)
    program = "import sys; from rayneuron.text.text import Text, check; check(sys.argv[1]); text = Text(sys.argv[1])\n"
    program += "text.chat([{'role': 'user', 'content': 'x'}]); print({'torch', 'transformers'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"
