"""One parsed call: what was asked, the requests it became, and how to answer; independent of the dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rayneuron.types import Delta, Request

Json = dict[str, Any]


class Detokenizes(Protocol):
    """The part of a detokenizer the dialects use."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Encoder(Protocol):
    """The part of `rayneuron.text.text.Text` the dialects use."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def wordless(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True, limit: int | None = None, side: str | None = None) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]: ...

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]: ...

    def detokenizer(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> Detokenizes: ...

    def token(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What a server knows before any call. `models`: served names, the first answers a body without `model`; `any_name`: so does any other.

    `max_model_len` counts prompt and output tokens together. `defaults`: sampling defaults as `sampling.sampling_defaults` returns them.
    `trust_chat_template` False refuses templates sent by clients: a template is a program, and a hostile one can hold the event loop.
    `client_priority`: whether a body may set `priority`.
    """

    models: tuple[str, ...]
    text: Encoder
    max_model_len: int
    vocab_size: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_prompts: int = 1024
    trust_chat_template: bool = True
    any_name: bool = False
    client_priority: bool = False

    @property
    def most_ids(self) -> int:
        """Token ids one field may hold: what could be cut to a prompt, or read as a document; each costs a look."""
        return max(65_536, 2 * self.max_model_len)


class Answer(NamedTuple):
    """How one endpoint of one dialect answers.

    `reply(call, deltas)`: the unary reply from every delta of the call in arrival order; raises what a failed delta says.
    `wrap(call, choices)`: a whole chunk of a stream. `opening(call)`: choices of the chunks sent before any text.
    `choice(call, progress, delta, prompt_logprobs)`: one choice of a chunk; `progress.begun` tells a choice's first chunk from later ones.
    """

    reply: Callable[[Call, Iterable[Delta]], Json]
    wrap: Callable[[Call, list[Json]], Json]
    opening: Callable[[Call], list[Json]]
    choice: Callable[..., Json]


@dataclass(frozen=True, slots=True)
class Head:
    """What a body says about the reply rather than about the text."""

    model: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stream_interval: int = 1
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    priority: int = 0
    cache_salt: str = ""
    client_id: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One parsed call. `requests[p]` is prompt p; choice c of prompt p has index `p * n + c` in the reply, which has `choices` in all.

    `logprobs`, `prompt_logprobs`: alternatives to show a token, None for no probabilities. `echo`: the prompts as text, where the reply
    repeats them, with `echo_offsets`: where each of their tokens begins, where that is asked for. `unknown`: field names nobody here knows.
    """

    id: str
    created: int
    head: Head
    n: int
    choices: int
    requests: list[Request]
    text: Encoder
    answer: Answer
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    echo_offsets: tuple[list[int], ...] = ()
    role: str = "assistant"
    unknown: tuple[str, ...] = ()

    def reply(self, deltas: Iterable[Delta]) -> Json:
        """As the answer's."""
        return self.answer.reply(self, deltas)
