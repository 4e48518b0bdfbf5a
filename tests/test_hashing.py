"""The names of blocks: by hand, and apart wherever anything differs."""

from __future__ import annotations

import itertools
import struct
from hashlib import blake2b
from pathlib import Path

from rayneuron.hashing import chain, fingerprint, root


def test_a_chain_by_hand() -> None:
    start = root("m")
    first = blake2b(start + struct.pack("<3i", 5, 6, 7), digest_size=16).digest()
    second = blake2b(first + struct.pack("<3i", 8, 9, 2**31 - 1), digest_size=16).digest()
    ids = [5, 6, 7, 8, 9, 2**31 - 1, 10]
    assert chain(ids, 3, start) == [first, second] == chain(ids, 3, start, [first]) == chain(ids, 3, start, [first, second])
    assert chain(ids[:2], 3, start) == [] and chain(ids[:6], 3, start) == [first, second]


def test_roots_differ_wherever_a_word_does() -> None:
    words = ["", "a", "ab", "b", "\ud800", "a\0"]
    assert len({root(*three) for three in itertools.product(words, repeat=3)}) == len(words) ** 3


def test_a_fingerprint_is_of_what_the_files_hold(tmp_path: Path) -> None:
    def made(name: str, config: bytes = b"{}", weights: bytes = bytes(500_000), file: str = "a.safetensors") -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes(config)
        (folder / file).write_bytes(weights)
        (folder / "tokenizer.json").write_text(name)
        return fingerprint(folder)

    changed = bytearray(500_000)
    changed[250_000] = 1
    told = [made("1"), made("3", b"[]"), made("4", weights=bytes(500_001)), made("5", weights=bytes(changed)), made("6", file="b.bin")]
    assert made("2") == told[0] and len(set(told)) == 5
