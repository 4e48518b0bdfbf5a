"""What crosses process boundaries: requests, sampling parameters, deltas, usage, snapshots (msgspec structs)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import force_setattr

from rayneuron.constraints import Beams, StructuredOutputs
from rayneuron.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
Fault = Literal["engine", "choice", "request", "call"]  # what failed: all the engine had, one choice, what it asked for, so did its call

MAX_STOP_CHARACTERS = 4096  # of all stop strings of a request together
MAX_LOGPROBS = 20  # alternatives a token, as OpenAI and vLLM cap them
MAX_BIAS = 100.0  # OpenAI's range; larger values are clamped, as vLLM does
MAX_NGRAM = 64  # a longer n-gram is searched for in every step, and hardly ever found
MAX_INT32 = 2**31 - 1  # what a step's arrays hold
MIN_TEMPERATURE = 0.01  # below this fp32 logits overflow; vLLM raises small temperatures to it too


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens, named as vLLM names it. Ranges are checked on construction; vocabulary and lengths by the engine.

    Two spellings of one wish are one value: small temperatures are raised, biases clamped, ids listed once and in order.
    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1, `min_p` 0 and `typical_p` 1 switch the filter off. `max_tokens` None: as many as
    fit. `logprobs` k returns the chosen token and the k likeliest (0: the chosen one only), or `logprob_token_ids` instead of those.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    beams: Beams | None = None

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # never true of a NaN, and integers of any size compare
                raise RequestError(f"{name} must be between {low} and {high}, got {_shown(value)}", param=name)
        for name, most in (("top_p", 1.0), ("typical_p", 1.0), ("repetition_penalty", sys.float_info.max)):
            if not 0.0 < getattr(self, name) <= most:
                said = "in (0, 1]" if most == 1.0 else "greater than 0"
                raise RequestError(f"{name} must be {said}, got {_shown(getattr(self, name))}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}", param="min_tokens")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            force_setattr(self, "temperature", MIN_TEMPERATURE)
        if self.beams is not None:
            self.beams.check(self.n, self.max_tokens, self.stop, self.structured_outputs)
        elif self.n > 1 and self.greedy:
            raise RequestError(f"n must be 1 with greedy sampling (temperature 0), got {self.n}", param="n")
        if any(not s for s in self.stop):
            raise RequestError("stop must not hold an empty string", param="stop")
        if (length := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            raise RequestError(f"stop may hold at most {MAX_STOP_CHARACTERS} characters in all, got {length}", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty; leave it out to allow all", param="allowed_token_ids")
        self._settle_ids()

    def _settle_ids(self) -> None:
        """Sets of ids in one spelling, and biases within their range."""
        if self.logprob_token_ids:
            force_setattr(self, "logprob_token_ids", tuple(dict.fromkeys(self.logprob_token_ids)))
            force_setattr(self, "logprobs", self.logprobs or 0)
        for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids"):
            if ids := getattr(self, name):
                force_setattr(self, name, tuple(sorted(set(ids))))
        if self.logit_bias is not None:
            if any(math.isnan(value) for value in self.logit_bias.values()):
                raise RequestError("logit_bias must hold numbers, got nan", param="logit_bias")
            force_setattr(self, "logit_bias", {t: max(-MAX_BIAS, min(MAX_BIAS, v)) for t, v in self.logit_bias.items()} or None)

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is always chosen."""
        return self.temperature == 0.0

    @property
    def edits_logits(self) -> bool:
        """True where a host-side logits processor has work for this request; a constraint is none."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.no_repeat_ngram_size
        bans = self.banned_token_ids or self.bad_words_ids or self.min_tokens or self.allowed_token_ids is not None
        return bool(penalties or bans or self.logit_bias)


def _shown(value: float) -> str:
    """A number as an error says it: short, however long it is (Python refuses to print the longest)."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else repr(value)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("max_tokens", 0, MAX_INT32),
    ("min_tokens", 0, MAX_INT32),
    ("temperature", 0, 2),
    ("top_k", -1, MAX_INT32),
    ("min_p", 0, 1),
    ("seed", -(2**63), 2**63 - 1),
    *((name, -2, 2) for name in ("presence_penalty", "frequency_penalty")),
    ("no_repeat_ngram_size", 0, MAX_NGRAM),
    *((name, 0, MAX_LOGPROBS) for name in ("logprobs", "prompt_logprobs")),
)


class Request(msgspec.Struct, kw_only=True):
    """One prompt on its way to the engine; token ids only.

    `priority`: lower runs earlier (vLLM's sense). `arrival_s`, `deadline_s` are `time.monotonic()` seconds of the engine's process.
    `cache_salt`: only requests of the same one share cached prefixes. `seed`: of choice 0, whoever drew it; None: the engine does.
    `output_ids`: what another engine has generated of its one choice already. `trace`: a W3C traceparent, under which others may say more.
    `prediction`: what its output may be; where drafts are tried, that makes it come sooner, and changes no token.
    `pooling`: its prompt's hidden states are wanted instead of tokens (max_tokens 0), of the last position or the mean of all.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    adapter: str | None = None
    cache_salt: str = ""
    seed: int | None = None
    output_ids: list[int] = []
    trace: str = ""
    prediction: list[int] | None = None
    pooling: Literal["last", "mean"] | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probability of one token and of the likeliest alternatives (descending); `rank` 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Stamps(msgspec.Struct):
    """The life of a request in `time.monotonic()` seconds (0.0: not reached); the seven trace points."""

    arrived: float = 0.0
    scheduled: float = 0.0
    prefill_done: float = 0.0
    handed_over: float = 0.0
    adopted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class TokenDelta(msgspec.Struct, omit_defaults=True, gc=False):
    """What one engine step adds to one choice of one request. `index` is the choice (0 <= index < n).

    `token_ids` holds every generated token, the stopping one included; `stop_token` is that id when a stop token (not EOS) ended it.
    `prompt_logprobs` comes once, with the first delta of choice 0, and starts with None. `stamps` and `preemptions` come with the last.
    `remote`: this first token comes from another pool, and so will the KV before it. `predicted`: its prediction's drafts, true and not.
    `pooled`: float32 [E], where asked for. `error` says why in words a client may read (`fault` "engine": for the log), `param` what of.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    eos: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    remote: bool = False
    preemptions: int = 0
    error: str | None = None
    fault: Fault = "engine"
    param: str | None = None
    stamps: Stamps | None = None
    predicted: tuple[int, int] = (0, 0)
    pooled: bytes = b""


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one reply. `predicted`: as in TokenDelta."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    predicted: tuple[int, int] = (0, 0)


class Delta(msgspec.Struct, gc=False):
    """A `TokenDelta` with its text: what a client sees. `text` never holds half a character nor a withheld stop string.

    `token_ids` are the output tokens of this delta; `stop_reason` is the stop string or token id that ended the choice, None for EOS.
    A choice that failed while others go on says finish_reason "error", and why as its `stop_reason`; `error` ends the whole call.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    usage: Usage | None = None
    error: str | None = None
    pooled: bytes = b""


def join(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one choice as one. Finish and usage are the last one's."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    scored = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return msgspec.structs.replace(
        last,
        text="".join([delta.text for delta in deltas]),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[entry for part in scored for entry in part] if scored else None,
        prompt_logprobs=first.prompt_logprobs,
    )


class Snapshot(msgspec.Struct, frozen=True):
    """The load of one engine at one moment: what admission, routing, scaling, health and metrics decide on."""

    running: int = 0
    waiting: int = 0
    remote: int = 0
    slots_free: int = 0
    slots_total: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    waiting_tokens: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_limbo: int = 0
    blocks_pinned: int = 0
    blocks_total: int = 0
    prefix_evictions: int = 0
    ledger_wrong: int = 0
    steps: int = 0
    preemptions: int = 0
    last_step_s: float = 0.0
    step_started_s: float = 0.0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine's steps take, in ms from packing to output, all taking the likeliest ids. `policies.step_times` reads between points.

    decode: (rows, attended positions, ms); prefill: (rows, new tokens, attended positions, ms). tokens: (new tokens of a step, ms) over
    short contexts: differences say what more add. chunk: most new tokens of a prefill step; chunk_ms: its longest time while others
    decode, 0 for any; fitting: the most then, by lengths (empty: as the times say). host_ms: of a step beside that. output_tokens of a
    request, 0 before the first. verify, passes: (rows, ms) with all drafts, and of a draft's pass. padded: steps take what buckets do.
    """

    batch: tuple[int, ...]
    lengths: tuple[int, ...]
    context: tuple[int, ...]
    prefix: tuple[int, ...]
    chunk: int
    decode: tuple[tuple[int, int, float], ...]
    prefill: tuple[tuple[int, int, int, float], ...]
    tokens: tuple[tuple[int, float], ...]
    verify: tuple[tuple[int, float], ...] = ()
    passes: tuple[tuple[int, float], ...] = ()
    chunk_ms: float = 0.0
    fitting: tuple[int, ...] = ()
    host_ms: float = 0.0
    output_tokens: float = 0.0
    padded: bool = True
