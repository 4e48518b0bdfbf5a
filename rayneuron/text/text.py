"""Tokenizer and chat template of a model: text to ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from rayneuron.errors import RequestError
from rayneuron.text.chat_template import ChatTemplate, compiled
from rayneuron.text.detokenizer import Bytes, Detokenizer, Window, speller
from rayneuron.text.tokenizer import bound_of, eos_ids, find, open_tokenizer, read_json, read_templates, special_ids, vocab_size

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
        self._plain: dict[int, str] = {}  # those of them that are ASCII and nothing special
        self._bound = bound_of(backend)
        eos, self._bos = self.tokenizer.id_of("eos_token"), self.tokenizer.id_of("bos_token")
        self.eos_ids: frozenset[int] = eos_ids(self.path) | (frozenset() if eos is None else {eos})
        rows = vocab_size(read_json(self.path / "config.json"))
        self.vocab_size: int = rows or max(backend.get_vocab().values(), default=-1) + 1
        self.config: dict[str, Any] = self._config()
        told = self._templates.get("tool_use") or self._templates.get("default")
        self.tool_template = told.source if told is not None else ""

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
            # "Fast" is without where each token stands in the text. Only batches give up the interpreter lock.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
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

        `variables` and further words reach the template, which must read the latter; `limit` and `side` as in `encode`. RequestError when
        there is no template, it refuses the messages, or leaves the text of one out.
        """
        template = self._template_for(chat_template, bool(tools))
        if limit is not None and self._bound is not None and side is None:
            said = "".join([m["content"] for m in messages if isinstance(m.get("content"), str)])
            if len(said) > ROOM * limit and self._bound.exceeded(said, limit):
                raise _too_long(limit)
        for name, given in (("tools", tools), ("documents", documents), *((name, value is not None) for name, value in more.items())):
            if given and name not in template.reads:
                raise RequestError(f"{name}: the chat template has no place for {name}; leave it out, or use one that has", param=name)
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
            if spelled.isascii() and token_id not in self.special_ids:
                self._plain[token_id] = spelled.decode()
        return spelled

    def special(self, name: str) -> int | None:
        """The id of a special token."""
        token_id = self._backend.token_to_id(name)
        return token_id if token_id in self.special_ids else None

    def detokenizer(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh detokenizer for what follows `prompt_ids`. `kept`: special tokens that are not skipped."""
        skipped = (self.special_ids - kept if kept else self.special_ids) if skip_special_tokens else frozenset()
        if self._spell is None:
            return Window(lambda ids: self.decode([i for i in ids if i not in skipped], False), prompt_ids)
        return Bytes(self.token_bytes, skipped, self._strip, prompt_ids, self._plain)

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
