"""What the engine gives of one request, as text: tokens put together, stop strings looked for."""

from __future__ import annotations

from rayneuron.errors import RequestError
from rayneuron.text.detokenizer import Detokenizer
from rayneuron.text.stops import Stops, StopStrings
from rayneuron.text.text import Text
from rayneuron.types import Delta, FinishReason, Request, TokenDelta, TokenLogprobs, Usage


class _Choice:
    """One growing choice: its detokenizer, its stop scanner, and what waits for the next delta that has text."""

    __slots__ = ("cached", "count", "done", "ids", "logprobs", "predicted", "prompt_logprobs", "stops", "words")

    def __init__(self, words: Detokenizer, stops: Stops | None) -> None:
        self.words = words
        self.stops = stops
        self.count = self.cached = 0
        self.predicted, self.done = (0, 0), False
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None


class Assembler:
    """Turns the token deltas of one request into text deltas, for all its choices.

    A `push` gives None while all it has is withheld; ids and logprobs then travel with the next delta, so every token and logprob is
    sent exactly once. After a stop string the delta says finish_reason "stop" and the caller must abort the choice in the engine; its later
    token deltas give None. Tokens up to the one that completes the stop string, itself included, are counted. The text of an EOS or stop
    token is no part of the output, unless `include_stop_str_in_output` asks for it. Prompt logprobs are never withheld. `kept`: special
    tokens that are text here, for whoever reads on.
    """

    def __init__(self, request: Request, text: Text, kept: frozenset[int] = frozenset()) -> None:
        self.request = request
        self._kept = kept
        self._text = text
        if text.wordless and request.params.stop:
            raise RequestError("stop needs a tokenizer (model.skip_tokenizer_init); send stop_token_ids", param="stop")
        self._stops = StopStrings(request.params.stop) if request.params.stop else None
        self._choices: dict[int, _Choice] = {}

    def push(self, delta: TokenDelta) -> Delta | None:
        """The text delta of one token delta, or None where there is nothing to send yet."""
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = self._begin()
        if choice.done:
            return None
        if choice.stops is None and len(delta.token_ids) == 1 and self._plain(choice, delta):  # nearly always
            choice.count += 1
            if text := choice.words.push(delta.token_ids[0]):
                return Delta(delta.request_id, delta.index, text, delta.token_ids)
            choice.ids += delta.token_ids
            return None
        text, taken, stop = self._read(choice, delta)
        finish: FinishReason | None = "stop" if stop is not None else delta.finish_reason
        choice.ids += delta.token_ids[:taken]
        choice.cached = max(choice.cached, delta.cached_tokens)
        choice.predicted = max(choice.predicted, delta.predicted)
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + delta.logprobs[:taken]
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = delta.prompt_logprobs
        if not (text or self._text.wordless) and finish is None and choice.prompt_logprobs is None:
            return None
        return self._send(choice, delta, text, finish, stop)

    def _plain(self, choice: _Choice, delta: TokenDelta) -> bool:
        """Whether a delta tells of nothing but its tokens, and nothing else waits for the next that has text."""
        told = delta.finish_reason or delta.logprobs or delta.prompt_logprobs or delta.cached_tokens or delta.predicted != choice.predicted
        return not (told or choice.ids or choice.logprobs or choice.prompt_logprobs or self._text.wordless)

    def _begin(self) -> _Choice:
        params = self.request.params
        words = self._text.detokenizer(self.request.prompt_ids, params.skip_special_tokens, self._kept)
        return _Choice(words, None if self._stops is None else Stops(self._stops, params.include_stop_str_in_output))

    def _read(self, choice: _Choice, delta: TokenDelta) -> tuple[str, int, str | None]:
        """Text to send, how many of the delta's tokens count, and the stop string that ended the choice."""
        params, ids, text = self.request.params, delta.token_ids, ""
        ended_by_token = delta.eos or delta.stop_token is not None
        shown = len(ids) - 1 if ended_by_token and not params.include_stop_str_in_output else len(ids)
        for place, token_id in enumerate(ids):
            choice.count += 1
            if place >= shown:
                continue
            piece = choice.words.push(token_id)
            if choice.stops is not None and piece:
                piece, stop = choice.stops.push(piece, armed=choice.count > params.min_tokens)
                if stop is not None:
                    return text + piece, place + 1, stop
            text += piece
        if delta.finish_reason is None:
            return text, len(ids), None
        rest, stop = self._end(choice)
        return text + rest, len(ids), stop

    def _end(self, choice: _Choice) -> tuple[str, str | None]:
        """What was withheld, once no token will follow."""
        rest = choice.words.flush()
        if choice.stops is None:
            return rest, None
        rest, stop = choice.stops.push(rest, armed=bool(rest) and choice.count > self.request.params.min_tokens)
        return (rest, stop) if stop is not None else (rest + choice.stops.flush(), None)

    def _send(self, choice: _Choice, delta: TokenDelta, text: str, finish: FinishReason | None, stop: str | None) -> Delta:
        ids, choice.ids = choice.ids, []
        logprobs, choice.logprobs = choice.logprobs, None
        prompt_logprobs, choice.prompt_logprobs, usage = choice.prompt_logprobs, None, None
        if finish is not None:
            choice.done = True
            usage = Usage(len(self.request.prompt_ids), choice.count, choice.cached, choice.predicted)
        return Delta(
            request_id=delta.request_id,
            index=delta.index,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=stop if stop is not None else delta.stop_token,
            prompt_logprobs=prompt_logprobs,
            usage=usage,
            error=delta.error,
            pooled=delta.pooled,
        )
