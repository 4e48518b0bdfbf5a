"""One parsed call: what was asked, the requests it became, and how to answer; independent of the dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rayneuron.api.errors import Triple, same
from rayneuron.api.scan import Scan
from rayneuron.api.vectors import Pooling
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

    def detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> Detokenizes: ...

    def special(self, name: str) -> int | None: ...

    def token(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class LmiOptions(NamedTuple):
    """What a server says of LMI's replies: another `output_formatter` (json, jsonlines, sse), and whether they are as TGI's."""

    output_formatter: str | None = None
    tgi_compat: bool = False

    @property
    def events(self) -> bool:
        """Whether a stream is one of events."""
        return self.output_formatter == "sse" or (self.output_formatter is None and self.tgi_compat)


@dataclass(frozen=True, slots=True)
class Context:
    """What a server knows before any call. `models`: served names, the first answers a body without `model`; `any_name`: so does any other.

    `max_model_len` counts prompt and output tokens together. `defaults`: sampling defaults as `body.sampling_defaults` returns them.
    `trust_chat_template` False refuses templates sent by clients: a template is a program, and a hostile one can hold the event loop.
    `client_priority`: whether a body may set `priority`. `adapters`: what there are at this moment, content by name.
    `stream_interval`: that of a body without. `template_kwargs`: words for the chat template where a body does not say them.
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
    stream_interval: int = 1
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    lmi: LmiOptions = LmiOptions()
    scan: Scan = Scan()
    pooling: Pooling = Pooling()
    adapters: Callable[[], Mapping[str, str]] = dict

    @property
    def most_ids(self) -> int:
        """Token ids one field may hold: what could be cut to a prompt, or read as a document; each costs a look."""
        return max(65_536, 2 * self.max_model_len)


class Writer(Protocol):
    """A call's deltas as the bytes of a stream. `done` once every choice finished or one failed; `failed`: nothing may follow any more."""

    content_type: str
    done: bool
    failed: bool

    def first(self) -> bytes:
        """What goes before any text."""

    def chunk(self, delta: Delta) -> bytes:
        """The bytes of one delta; b"" while there is nothing to send."""

    def last(self) -> bytes:
        """What ends the stream."""

    def error(self, wrong: BaseException) -> bytes:
        """The end of a stream that fails."""


class Answer(NamedTuple):
    """How a call is answered. `reply`: whole, from every delta in arrival order; raises what a failed delta says. `open`: as a stream."""

    reply: Callable[[Call, Iterable[Delta]], Any]
    open: Callable[[Call], Writer]


class Dialect(NamedTuple):
    """What one route speaks. `parse` makes a body a call, which brings its answer; `error` an OpenAI error this dialect's.

    `choose`: which dialect a body is in, where the route has several; `head`: fields that the path and the headers say, over the body's.
    """

    parse: Callable[..., Call]
    error: Callable[[Triple], Triple] = same
    choose: Callable[[Json], Dialect] | None = None
    head: Callable[[Mapping[str, str], Callable[[str], str | None]], Json] | None = None


class Head(NamedTuple):
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
    adapter: str | None = None
    client_id: str | None = None


class Call(NamedTuple):
    """One parsed call. `requests[p]` is prompt p; choice c of prompt p has index `p * n + c` in the reply, which has `choices` in all.
    `best`: choices tried of each prompt, where the reply has the `n` best of them, the best first; 0: it has them as they are.

    `logprobs`, `prompt_logprobs`: alternatives to show a token, None for no probabilities. `echo`: the prompts as text, where the reply
    repeats them, with `echo_offsets`: where each of their tokens begins, where that is asked for. `unknown`: field names nobody here knows.
    `scan`: what is told apart in a chat's answer.
    """

    id: str
    created: int
    head: Head
    n: int
    choices: int
    requests: list[Request]
    text: Encoder
    answer: Answer
    best: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    echo_offsets: tuple[list[int], ...] = ()
    role: str = "assistant"
    scan: Scan = Scan()
    unknown: tuple[str, ...] = ()

    def reply(self, deltas: Iterable[Delta]) -> Any:
        """As the answer's."""
        return self.answer.reply(self, deltas)
