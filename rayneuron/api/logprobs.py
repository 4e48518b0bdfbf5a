"""Log-probabilities as the two OpenAI endpoints and vLLM's prompt_logprobs show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rayneuron.api.call import Call
from rayneuron.types import TokenLogprobs

FLOOR = -9999.0  # JSON has no infinity; vLLM's stand-in


def finite(logprob: float) -> float:
    """`logprob` as JSON can carry it."""
    return logprob if logprob > FLOOR else FLOOR  # NaN compares false


def shown(call: Call, token_id: int) -> str:
    """A token as text, or as `token_id:<n>` where the call asked for that."""
    return f"token_id:{token_id}" if call.head.tokens_as_ids else call.text.token(token_id)


class Offsets:
    """Where each token begins in the text, in characters; a token inside a character has that character's place."""

    __slots__ = ("_begun", "_call", "_place", "_skipped")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._place = 0
        self._begun = False
        self._skipped = call.text.special_ids if call.requests[0].params.skip_special_tokens else frozenset()

    def of(self, token_id: int, text: str) -> int:
        """Offset of the next token. `text` is what the tokens spell, so that a leading space it does not have is not counted."""
        piece = b"" if token_id in self._skipped else self._call.text.token_bytes(token_id)
        if piece and not self._begun:
            self._begun = True
            piece = piece if text.startswith(" ") else piece.removeprefix(b" ")
        place = self._place - (1 if piece and piece[0] & 0xC0 == 0x80 and self._place else 0)
        self._place += sum(byte & 0xC0 != 0x80 for byte in piece)
        return place


def completion_logprobs(
    call: Call, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Offsets, text: str
) -> dict[str, Any]:
    """The `logprobs` object of a completion choice. A None entry (first prompt token) has no probability.

    The chosen token is always among `top_logprobs`; two ids that show alike keep the likelier one. `text`: see `Offsets.of`.
    """
    return {
        "tokens": [shown(call, token_id) for token_id in ids],
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _table(call, entry) for entry in entries],
        "text_offset": [offsets.of(token_id, text) for token_id in ids],
    }


def _table(call: Call, entry: TokenLogprobs) -> dict[str, float]:
    table = {shown(call, entry.token_id): finite(entry.logprob)}
    for token_id, logprob in entry.top[: call.logprobs]:
        name = shown(call, token_id)
        table[name] = max(table.get(name, FLOOR), finite(logprob))
    return table


def chat_logprobs(call: Call, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice; `bytes` are the token's true bytes, also where they are part of a character."""
    content = []
    for entry in entries:
        item = _item(call, entry.token_id, entry.logprob)
        item["top_logprobs"] = [_item(call, token_id, logprob) for token_id, logprob in entry.top[: call.logprobs]]
        content.append(item)
    return {"content": content, "refusal": None}


def _item(call: Call, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": shown(call, token_id), "logprob": finite(logprob), "bytes": list(call.text.token_bytes(token_id))}


def prompt_table(call: Call, entries: Iterable[TokenLogprobs | None]) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: per token an object from id to {logprob, rank, decoded_token}; the first is null."""
    return [None if entry is None else _ranked(call, entry) for entry in entries]


def _ranked(call: Call, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
    ranked = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(entry.top[: call.prompt_logprobs], start=1):
        ranked.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": call.text.token(token_id)}
        for token_id, (logprob, rank) in ranked.items()
    }
