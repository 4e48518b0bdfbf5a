"""Small real tokenizers of three kinds as model directories, and a corpus of scripts that break careless detokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog.",
    "a family 👩‍👩‍👧‍👦, a flag 🏴‍☠️, a skin 👍🏽, a keycap 1️⃣",
    "你好，世界。今天天气怎么样？",
    "日本語のテキスト、カタカナとひらがな。",
    "안녕하세요 세계, 각갂갃",
    "สวัสดีชาวโลก กำลัง น้ำ",
    "नमस्ते दुनिया, क्षत्रिय, ज़िंदगी",
    "Příliš žluťoučký kůň; ď Ǆ ﬀ é e\u0301",
    "مرحبا بالعالم، שלום עולם",
    "  two  spaces\n\n\ttab \r\n end  ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 𒀀",
    "\u200b\ufeff zero \u2028 widths \ufffd replacement",
)
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
KEPT = "<tool>"  # added, but not special: it stays in the text
CHATML = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% if not (loop.last and continue_final) %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(
    tokenizer: Tokenizer,
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    words: Mapping[str, Any] | None = None,
) -> Path:
    """Save a tokenizer with config.json, generation_config.json (where given) and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = {"vocab_size": tokenizer.get_vocab_size(), "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(plain | dict(config or {})))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHATML, "model_max_length": 4096}
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in (named | dict(words or {})).items() if v is not None}))
    return folder


def _finish(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(KEPT, special=False, normalized=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)])
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2's kind, trained on the corpus: many tokens hold a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finish(tokenizer)


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama's kind: letters of the Latin alphabet, some pairs, and 256 byte tokens for everything else."""
    letters = [chr(code) for code in range(0x21, 0x7F)] + ["▁", "你", "好", "é"]
    pairs = ["▁t", "th", "he", "▁a", "in", "▁▁", "er", "▁w"]
    names = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *pairs]
    vocab = {name: place for place, name in enumerate(names)}
    merges = [(pair[0], pair[1]) for pair in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(tokenizer)


def word_piece_tokenizer() -> Tokenizer:
    """BERT's kind: pieces joined by spaces unless they begin with ##."""
    names = ["<unk>", "<s>", "</s>", "un", "##aff", "##able", "hello", "world", ".", ",", "##s", "你", "好"]
    tokenizer = Tokenizer(models.WordPiece(vocab={name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return _finish(tokenizer)


def byte_level(folder: Path, **files: Any) -> Path:
    """A model directory with the byte-level tokenizer; `files` as `write` takes them."""
    return write(byte_level_tokenizer(), folder, **files)


def byte_fallback(folder: Path, **files: Any) -> Path:
    """A model directory with the byte-fallback tokenizer."""
    return write(byte_fallback_tokenizer(), folder, **files)


def word_pieces(folder: Path, **files: Any) -> Path:
    """A model directory with the word-piece tokenizer."""
    return write(word_piece_tokenizer(), folder, **files)
