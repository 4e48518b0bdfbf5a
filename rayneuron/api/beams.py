"""Beam search as bodies ask for it: vLLM's `use_beam_search`, transformers' `num_beams`."""

from __future__ import annotations

from rayneuron.api.fields import Fields, whole, wrong
from rayneuron.constraints import MAX_WIDTH, Beams
from rayneuron.errors import RequestError


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
