"""What a choice's whole output must match, or how it is searched for, as a client said it: pure data, part of SamplingParams."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rayneuron.errors import RequestError

MAX_WIDTH = 128  # as many as choices
MAX_PENALTY = 10.0  # a power beyond makes scores that are no numbers
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One constraint, named as vLLM names it (its StructuredOutputsParams). Exactly one of the first six is said.

    `json`: a schema, as a table or as JSON text. `regex` and `choice` hold for the whole output. `grammar`: Lark, where `%json {...}`
    stands for a schema, or GBNF. `structural_tag`: vLLM's table of tags, or its JSON. `whitespace_pattern`: a regex of what may stand
    between the parts of JSON. `after`: ids of a marker, behind whose first occurrence in the output the constraint begins; before it
    anything may come. `free_tokens`: after so many tokens without the marker it is forced; the tokens behind the marker `begins` are
    counted, which comes first of all or never. Where nothing is said but that, only the marker is forced. `field`: who an error is about.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    after: tuple[int, ...] = ()
    begins: tuple[int, ...] = ()
    free_tokens: int | None = None
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        said = [kind for kind in KINDS if getattr(self, kind) not in (None, False) or (kind == "json" and self.json is False)]
        if len(said) != 1 and not (not said and self.free_tokens is not None):
            got = ", ".join(said) or "none"
            raise RequestError(f"{self.field} must name exactly one constraint of {', '.join(KINDS)}; got {got}", param=self.field)
        if self.choice is not None and not self.choice:
            raise RequestError(f"{self.field}.choice must not be empty", param=self.field)
        try:
            msgspec.msgpack.encode((self.json, self.structural_tag))
        except (OverflowError, RecursionError) as wrong:  # it is sent to other processes, and known again by its bytes
            raise RequestError(f"{self.field} holds what no message can: {wrong}", param=self.field) from None
        if self.free_tokens is not None and not self.after:
            raise RequestError("free_tokens needs the marker that `after` names", param=self.field)

    @property
    def kind(self) -> str:
        """Which of the constraints it is; "" where only the marker may be forced."""
        return next((kind for kind in KINDS if getattr(self, kind) not in (None, False) or (kind == "json" and self.json is False)), "")


class Beams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beam search: `width` beams at once; scores are divided by length ** length_penalty.

    rule "transformers": `early_stopping` True ends with the first `width` answers, False where no beam as it is could come before them,
    "never" where none could however long it grew. "vllm": ends with the last token there is room for.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    rule: Literal["transformers", "vllm"] = "transformers"

    def check(self, n: int, max_tokens: int | None, stop: tuple[str, ...], said: StructuredOutputs | None) -> None:
        """Raise RequestError for a search that cannot be, or for what it cannot have beside it."""
        if not 1 <= self.width <= MAX_WIDTH:
            raise RequestError(f"the width of a beam search must be between 1 and {MAX_WIDTH}, got {self.width}", param="beams")
        if not -MAX_PENALTY <= self.length_penalty <= MAX_PENALTY:
            allowed = f"between {-MAX_PENALTY} and {MAX_PENALTY}"
            raise RequestError(f"length_penalty must be {allowed}, got {self.length_penalty}", param="length_penalty")
        if n > self.width:
            raise RequestError(f"n must be at most the width of the beam search, {self.width}, got {n}", param="n")
        if said is not None:
            raise RequestError(f"{said.field} cannot constrain a beam search; leave one of the two out", param=said.field)
        if stop:
            raise RequestError("stop does not end a beam; send stop_token_ids", param="stop")
        if max_tokens == 0:
            raise RequestError("max_tokens must be at least 1 for a beam search", param="max_tokens")
