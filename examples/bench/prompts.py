"""Prompts of an exact number of tokens that nobody has sent before, as text and as ids."""

from __future__ import annotations

import random
import re
from typing import Any


class Words:
    """Prompts made of words that are one token each in one model's vocabulary (`text`: a rayneuron.text.text.Text)."""

    def __init__(self, text: Any) -> None:
        self._text = text
        pieces = (text.token(i) for i in range(text.vocab_size))
        self._words = [" " + piece[1:] for piece in pieces if re.fullmatch(r"[ Ġ▁][a-z]{3,9}", piece)]
        if not self._words:
            raise ValueError("this tokenizer has no words of one token; use token ids as prompts")

    def prompt(self, tokens: int, seed: str) -> tuple[str, list[int]]:
        """Text and its `tokens` ids. The same seed gives the same prompt."""
        draw = random.Random(seed)
        while True:
            text = "".join(draw.choice(self._words) for _ in range(tokens))
            ids = self._text.encode(text)
            if len(ids) == tokens:
                return text, ids


def body(model: str, prompt: str, new: int) -> dict[str, Any]:
    """One completion: greedy, exactly `new` tokens."""
    return {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
