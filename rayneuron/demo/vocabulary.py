"""Byte-level BPE tokenizers as files: the one of a GGUF model, and a small one for random test models."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

FILES = ("tokenizer.json", "tokenizer_config.json")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`names` in id order (0, 1, 2: unknown, begin, end), the pairs that merge in rank order, and the names that are control tokens."""

    names: tuple[str, ...]
    merges: tuple[tuple[str, ...], ...]
    special: tuple[str, ...]


def small(size: int) -> Vocabulary:
    """Three control tokens, the 256 bytes, and pairs of frequent letters up to `size` names: pieces of one and two bytes."""
    from tokenizers import pre_tokenizers

    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlcumwfg"
    pairs = itertools.product("\u0120" + letters, letters)  # \u0120 is how byte-level BPE writes a space
    merges = tuple(itertools.islice(pairs, size - len(special) - len(alphabet)))
    return Vocabulary((*special, *alphabet, *("".join(pair) for pair in merges)), merges, special)


def write(tokens: Vocabulary, folder: Path, length: int, chat_template: str) -> None:
    """Write tokenizer.json and tokenizer_config.json; `length` is the model's context in tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = {name: index for index, name in enumerate(tokens.names)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(tokens.merges)))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in tokens.special])
    tokenizer.save(str(folder / "tokenizer.json"))
    unknown, begin, end = tokens.names[:3]
    config = {
        "add_prefix_space": False,
        "bos_token": begin,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "model_max_length": length,
        "pad_token": end,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
