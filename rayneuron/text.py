"""Tokenizer, chat template and the assembly of token deltas into text deltas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayneuron.detokenizer import Bytes, Detokenizer, Window, speller
from rayneuron.errors import CheckpointError, ConfigError, RequestError
from rayneuron.stops import Stops
from rayneuron.types import Delta, FinishReason, Request, TokenDelta, TokenLogprobs, Usage

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # tokenizer_class of a tokenizer that is its tokenizer.json and nothing more
OVERRULED = ("mistral", "mixtral", "qwen2", None)  # model types for which transformers may take a class of its own instead of a generic one
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Text:
    """The tokenizer of one model directory (never a network call). `chat_template`: a Jinja text or the path of a file that holds one."""

    def __init__(self, path: str | Path, chat_template: str | Path | None = None) -> None:
        self.path = Path(path)
        self.tokenizer = _open(self.path)
        if chat_template is not None:
            self.tokenizer.chat_template = _template(chat_template)
        self._backend = getattr(self.tokenizer, "backend_tokenizer", None)
        self.special_ids: frozenset[int] = frozenset(self._special())
        self._spell, self._strip = (None, "") if self._backend is None else speller(self._backend.decoder)
        self._spelled: dict[int, bytes] = {}
        if self._backend is not None:  # a saved tokenizer may carry the truncation of its training
            self._backend.no_truncation()
            self._backend.no_padding()
        model, generation = _read(self.path / "config.json"), _read(self.path / "generation_config.json")
        self.eos_ids: frozenset[int] = frozenset(_ids(self.tokenizer.eos_token_id) | _eos(model) | _eos(generation))
        self.vocab_size: int = _vocab_size(model) or max(self.tokenizer.get_vocab().values(), default=-1) + 1
        self.config: dict[str, Any] = self._config()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. A text that already begins with the BOS token does not get a second one. RequestError for text that is not Unicode."""
        try:
            if self._backend is not None:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except (UnicodeError, TypeError) as wrong:
            raise RequestError(f"text cannot be encoded: {wrong}; lone surrogates are not characters", param="prompt") from wrong
        bos = self.tokenizer.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos] and text.startswith(self.tokenizer.bos_token):
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence, as the tokenizer itself decodes it."""
        if self._backend is not None:
            whole: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        else:
            whole = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return whole

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a rendered conversation. Special tokens come from the template alone unless `add_special_tokens`.

        `kwargs` reach the template. RequestError when there is no template or it refuses the messages.
        """
        if chat_template is None and self.tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template; send `chat_template`, set one in the deployment file, or use /v1/completions",
                param="messages",
            )
        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except Exception as wrong:  # templates raise whatever their filters raise; all of it is the caller's messages or template
            param = "messages" if chat_template is None else "chat_template"
            raise RequestError(f"{param}: the chat template failed on these messages: {wrong}", param=param) from wrong
        return self.encode(rendered, add_special_tokens=add_special_tokens)

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
        token = self._backend.id_to_token(token_id) if self._backend is not None else None
        return b"" if token is None else self._spell(token)

    def _special(self) -> list[int]:
        return [token_id for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special]

    def _config(self) -> dict[str, Any]:
        """tokenizer_config.json with its named tokens as plain strings and the chat template in force."""
        config = _read(self.path / "tokenizer_config.json")
        config.setdefault("tokenizer_class", type(self.tokenizer).__name__)
        config |= {name: getattr(self.tokenizer, name) for name in NAMED_TOKENS}
        config["chat_template"] = self.tokenizer.chat_template
        return config


def _open(path: Path) -> Any:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the directory that holds tokenizer.json")
    named = _read(path / "tokenizer_config.json")
    generic = named.get("tokenizer_class") in GENERIC and "auto_map" not in named and (path / "tokenizer.json").is_file()
    try:
        if generic and _read(path / "config.json").get("model_type") not in OVERRULED:  # a second less than by the register of all models
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as wrong:  # transformers and tokenizers raise whatever the file at fault made them trip over
        raise CheckpointError(f"no tokenizer could be read from {path}: {wrong}") from wrong


def _template(given: str | Path) -> str:
    """A Jinja text is told from a path by its braces."""
    if isinstance(given, str) and "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as wrong:
        raise ConfigError(f"chat_template: {given!s} is neither a template nor a readable file", param="chat_template") from wrong


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise CheckpointError(f"{path} is not valid JSON: {wrong}") from wrong
    return content if isinstance(content, dict) else {}


def _ids(value: object) -> set[int]:
    """An eos_token_id as configs write it: an id, a list of ids, or nothing."""
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, int):
        return {value}
    return {item for item in value if isinstance(item, int)} if isinstance(value, list) else set()


def _eos(config: Mapping[str, Any]) -> set[int]:
    nested = config.get("text_config")
    return _ids(config.get("eos_token_id")) | (_ids(nested.get("eos_token_id")) if isinstance(nested, dict) else set())


def _vocab_size(config: Mapping[str, Any]) -> int:
    nested = config.get("text_config")
    size = config.get("vocab_size") or (nested.get("vocab_size") if isinstance(nested, dict) else None)
    return size if isinstance(size, int) else 0


class _Choice:
    """One growing choice: its detokenizer, its stop scanner, and what waits for the next delta that has text."""

    __slots__ = ("cached", "count", "done", "ids", "logprobs", "prompt_logprobs", "stops", "words")

    def __init__(self, words: Detokenizer, stops: Stops | None) -> None:
        self.words = words
        self.stops = stops
        self.count = 0
        self.cached = 0
        self.done = False
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None


class Assembler:
    """Turns the token deltas of one request into text deltas, for all its choices.

    A `push` gives None while all it has is withheld; ids and logprobs then travel with the next delta, so every token and logprob is
    sent exactly once. After a stop string the delta says finish_reason "stop" and the caller must abort the choice in the engine; its later
    token deltas give None. Tokens up to and including the one that completes the stop string are counted. The text of an EOS or stop token
    is never part of the output, unless `include_stop_str_in_output` asks for it. Prompt logprobs are never withheld.
    """

    def __init__(self, request: Request, text: Text) -> None:
        self.request = request
        self._text = text
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
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + delta.logprobs[:taken]
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = delta.prompt_logprobs
        if not text and finish is None and choice.prompt_logprobs is None:
            return None
        return self._send(choice, delta, text, finish, stop)

    def _begin(self) -> _Choice:
        params = self.request.params
        words = self._text.detokenizer(self.request.prompt_ids, params.skip_special_tokens)
        return _Choice(words, Stops(params.stop, params.include_stop_str_in_output) if params.stop else None)

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
        prompt_logprobs, choice.prompt_logprobs = choice.prompt_logprobs, None
        usage = None
        if finish is not None:
            choice.done = True
            usage = Usage(len(self.request.prompt_ids), choice.count, choice.cached)
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
        )
