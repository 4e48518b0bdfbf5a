"""Token ids alone: what stands for `Text` where a deployment does without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayneuron.errors import RequestError
from rayneuron.text.detokenizer import Bytes
from rayneuron.text.text import Text
from rayneuron.text.tokenizer import eos_ids, read_json, vocab_size


class Wordless(Text):
    """Ids in, ids out (`model.skip_tokenizer_init`). Whatever needs words is refused; replies hold token ids and an empty text."""

    wordless = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.special_ids = frozenset()
        self.eos_ids = eos_ids(self.path)
        self.vocab_size = vocab_size(read_json(self.path / "config.json"))
        self.config, self.tool_template = {}, ""

    def encode(self, text: str, add_special_tokens: bool = True, limit: int | None = None, side: str | None = None) -> list[int]:
        """Refused."""
        raise RequestError("this server has no tokenizer (model.skip_tokenizer_init); send token ids as prompt", param="prompt")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """No text."""
        return ""

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Refused."""
        said = "this server has no tokenizer (model.skip_tokenizer_init); send token ids as prompt to /v1/completions"
        raise RequestError(said, param="messages")

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Refused where there are any."""
        if words:
            raise RequestError("bad_words needs a tokenizer (model.skip_tokenizer_init); send banned_token_ids", param="bad_words")
        return ()

    def token_bytes(self, token_id: int) -> bytes:
        """No bytes."""
        return b""

    def special(self, name: str) -> None:
        """There is none."""

    def detokenizer(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()) -> Bytes:
        """One that never says anything."""
        return Bytes(self.token_bytes, self.special_ids, "", (), {})
