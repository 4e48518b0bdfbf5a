"""How bodies ask for the best of several: vLLM's `use_beam_search`, transformers' `num_beams`, OpenAI's `best_of`."""

from __future__ import annotations

from typing import Any

from rayneuron.api.fields import Fields, whole, wrong
from rayneuron.constraints import MAX_WIDTH, Beams
from rayneuron.errors import RequestError

SEARCH = ("use_beam_search", "num_beams", "length_penalty", "early_stopping")


def read_beams(fields: Fields, stream: bool) -> Beams | None:
    """vLLM's search is as wide as its `best_of`, or `n`; each has its own rule of when it ends. RequestError for a stream of one."""
    name = "use_beam_search" if fields.flag("use_beam_search") else "num_beams"
    width = fields.integer("num_beams", 1, low=1, high=MAX_WIDTH)
    penalty, early = fields.number("length_penalty", 1.0), fields.take("early_stopping", False)
    if not isinstance(early, bool) and early != "never":
        wrong("early_stopping", 'true, false or "never"', early)
    if name == "use_beam_search":
        width = fields.integer("best_of", whole("n", fields.peek("n") or 1, 1, MAX_WIDTH), low=1, high=MAX_WIDTH)
    elif width == 1:
        for said, changes in (("length_penalty", penalty != 1.0), ("early_stopping", early is not False)):
            if changes:
                instead = "without beams there is none; send num_beams or use_beam_search too, or leave it out"
                raise RequestError(f"{said} is not supported by this server: {instead}", param=said)
        return None
    if stream:
        raise RequestError(f"{name} cannot be streamed: its tokens are known at the end; set stream to false", param=name)
    return Beams(width=width, length_penalty=penalty, early_stopping=early, rule="vllm" if name == "use_beam_search" else "transformers")


def read_best_of(fields: Fields) -> int:
    """How many choices are tried, of which the `n` best are answered; 0: no more than `n`."""
    if fields.peek("use_beam_search"):
        return 0  # there it is the width
    n = whole("n", fields.peek("n") or 1, 1, MAX_WIDTH)
    best = fields.integer("best_of", n, low=1, high=MAX_WIDTH)
    if best < n:
        raise RequestError(f"best_of must be at least n, {n}, got {best}", param="best_of")
    return best if best > n else 0


def check_best_of(words: dict[str, Any], stream: bool) -> None:
    """Raise RequestError where more choices could not be tried, or would all be alike."""
    for wrong_here, why in (
        (stream, "cannot be streamed: which is the best is known at the end; set stream to false"),
        ("beams" in words, "finds the best choice, and so does a beam search; leave one of the two out"),
        (words.get("temperature") == 0, "needs sampling, and at temperature 0 all choices are alike; leave it out, or send a temperature"),
    ):
        if wrong_here:
            raise RequestError(f"best_of {why}", param="best_of")
