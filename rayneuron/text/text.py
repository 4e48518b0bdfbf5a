"""Tokenizer, chat template and the assembly of token deltas into text deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from rayneuron.errors import RequestError
from rayneuron.text.chat_template import ChatTemplate, compiled
from rayneuron.text.detokenizer import Bytes, Detokenizer, Window, speller
from rayneuron.text.stops import Stops, StopStrings
from rayneuron.text.tokenizer import bound_of, eos_ids, find, open_tokenizer, read_json, read_templates, special_ids, vocab_size
from rayneuron.types import Delta, FinishReason, Request, TokenDelta, TokenLogprobs, Usage

SHORT = 2048  # characters; longer texts go as a batch of one, which gives up the interpreter lock and costs a change of threads
ROOM = 16  # characters a token of the longest prompt is given before only a part of a text is tokenised


class Text:
    """The tokenizer and chat template of one model directory (never a network call).

    `chat_template`: a Jinja text or the path of a file that holds one, instead of the model's own. Light: neither torch nor, where there is
    a tokenizer.json, transformers is imported.
    """

    wordless = False  # True where there are token ids and nothing else

    def __init__(self, path: str | Path, chat_template: str | Path | None = None) -> None:
        self.path = Path(path)
        self.tokenizer = open_tokenizer(self.path)
        self._backend = backend = self.tokenizer.backend
        self._templates = compiled(self.path, self.tokenizer.templates, chat_template)
        self.special_ids: frozenset[int] = special_ids(backend)
        self._spell, self._strip = speller(backend.decoder)
        self._spelled: dict[int, bytes] = {}
        self._bound = bound_of(backend)
        eos, self._bos = self.tokenizer.id_of("eos_token"), self.tokenizer.id_of("bos_token")
        self.eos_ids: frozenset[int] = eos_ids(self.path) | (frozenset() if eos is None else {eos})
        rows = vocab_size(read_json(self.path / "config.json"))
        self.vocab_size: int = rows or max(backend.get_vocab().values(), default=-1) + 1
        self.config: dict[str, Any] = self._config()

    def encode(self, text: str, add_special_tokens: bool = True, limit: int | None = None, side: str | None = None) -> list[int]:
        """Token ids. A text that already begins with the BOS token does not get a second one. RequestError for text that is not Unicode.

        `limit`: how many tokens are of use. Of a text that is far longer only as much is tokenised as settles that; it is refused, or where
        `side` ("left", "right") says from where the caller will cut it, ids enough for the rest are given.
        """
        if limit is not None and len(text) > ROOM * limit:
            if side is None and self._bound is not None and self._bound.exceeded(text, limit):
                raise _too_long(limit)
            part = text[-ROOM * limit :] if side == "left" else text[: ROOM * limit]
            encoding = self._encode(part, add_special_tokens)
            if len(encoding) > 2 * limit:  # where it was cut a few tokens are others, not as many as that
                if side is None:
                    raise _too_long(limit)
                return list(encoding.ids)
        ids: list[int] = self._encode(text, add_special_tokens).ids
        bos = self._bos
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos] and text.startswith(self.tokenizer.names["bos_token"]):
            del ids[0]
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> Any:
        try:
            if len(text) <= SHORT:
                return self._backend.encode(text, add_special_tokens=add_special_tokens)
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeError, TypeError) as wrong:
            raise RequestError(f"text cannot be encoded: {wrong}; lone surrogates are not characters", param="prompt") from wrong

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence, as the tokenizer itself decodes it."""
        whole: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return whole

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        limit: int | None = None,
        side: str | None = None,
        variables: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> list[int]:
        """Token ids of a rendered conversation. Special tokens come from the template alone unless `add_special_tokens`.

        `variables` and further words reach the template; `limit` and `side` as in `encode`. RequestError when there is no template, it
        refuses the messages, or leaves the text of one out.
        """
        template = self._template_for(chat_template, bool(tools))
        if limit is not None and self._bound is not None and side is None:
            said = "".join([m["content"] for m in messages if isinstance(m.get("content"), str)])
            if len(said) > ROOM * limit and self._bound.exceeded(said, limit):
                raise _too_long(limit)
        for name, given in (("tools", tools), ("documents", documents)):
            if given and name not in template.reads:
                raise RequestError(f"{name}: the chat template has no place for {name}; leave them out, or use one that has", param=name)
        words = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        try:
            told = {**self.tokenizer.names, **(variables or {}), **more, **words}
            rendered = template.conversation([dict(message) for message in messages], told, continue_final_message)
        except RequestError:
            raise
        except Exception as wrong:  # templates raise whatever their filters raise; all of it is the caller's messages or template
            param = "messages" if chat_template is None else "chat_template"
            raise RequestError(f"{param}: the chat template failed on these messages: {wrong}", param=param) from wrong
        return self.encode(rendered, add_special_tokens, limit, side)

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of each word as it begins a text, and as it follows a space where as many other tokens spell it so (vLLM's rule)."""
        found: list[tuple[int, ...]] = []
        for word in words:
            first, spaced = (tuple(self.encode(lead + word.lstrip(), add_special_tokens=False)) for lead in ("", " "))
            if not first:
                raise RequestError(f"bad_words: {word!r} has no tokens", param="bad_words")
            found.append(first)
            if len(spaced) == len(first) and spaced[0] != first[0]:
                found.append(spaced)
        return tuple(found)

    def token(self, token_id: int) -> str:
        """One token shown alone; U+FFFD where it holds part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; b"" for an id the tokenizer does not know."""
        spelled = self._spelled.get(token_id)
        if spelled is None:
            spelled = self._spelled[token_id] = self._bytes(token_id)
        return spelled

    def detokenizer(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh detokenizer for what follows `prompt_ids`."""
        if self._spell is None:
            return Window(lambda ids: self.decode(ids, skip_special_tokens), prompt_ids)
        return Bytes(self.token_bytes, self.special_ids if skip_special_tokens else frozenset(), self._strip, prompt_ids)

    def _bytes(self, token_id: int) -> bytes:
        if self._spell is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spell(token)

    def _template_for(self, given: str | None, tools: bool) -> ChatTemplate:
        """The template in force, chosen as transformers does where there are several."""
        if given is not None and given not in self._templates:
            try:
                return ChatTemplate(given)
            except jinja2.TemplateError as wrong:
                raise RequestError(f"chat_template is not a Jinja template: {wrong}", param="chat_template") from wrong
        name = given or ("tool_use" if tools and "tool_use" in self._templates else "default")
        if name in self._templates:
            return self._templates[name]
        raise RequestError(
            f"this model has several chat templates and none is the default: {', '.join(self._templates)}; name one as chat_template"
            if self._templates
            else "this model has no chat template; send `chat_template`, set one in the deployment file, or use /v1/completions",
            param="messages",
        )

    def _config(self) -> dict[str, Any]:
        """tokenizer_config.json with its named tokens as plain strings and the chat template in force."""
        config = read_json(self.path / "tokenizer_config.json")
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        config |= {name: self.tokenizer.names.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        several = {name: template.source for name, template in self._templates.items()}
        config["chat_template"] = several.get("default") if len(several) < 2 else several
        return config


def check(path: str | Path, chat_template: str | Path | None = None) -> None:
    """Raise ConfigError or CheckpointError where `Text` could not be had of these, without importing transformers."""
    folder = Path(path)
    find(folder)
    if (folder / "tokenizer.json").is_file():
        Text(folder, chat_template)
        return
    compiled(folder, read_templates(folder, read_json(folder / "tokenizer_config.json")), chat_template)


def _too_long(limit: int) -> RequestError:
    said = f"the prompt has more than {limit} tokens, but this model takes at most {limit} tokens, prompt and output together"
    return RequestError(said, param="input_tokens")


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
    token is no part of the output, unless `include_stop_str_in_output` asks for it. Prompt logprobs are never withheld.
    """

    def __init__(self, request: Request, text: Text) -> None:
        self.request = request
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

    def _begin(self) -> _Choice:
        params = self.request.params
        words = self._text.detokenizer(self.request.prompt_ids, params.skip_special_tokens)
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
