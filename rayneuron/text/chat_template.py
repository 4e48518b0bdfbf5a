"""Chat templates: rendered as transformers renders them, and held to say every text they are given."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from rayneuron.errors import CheckpointError, ConfigError, RequestError

Message = dict[str, Any]

TAG = "CONTINUE_FINAL_MESSAGE_TAG "
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; the first is the one templates read
THOUGHT = "</think>"  # templates leave out what earlier answers hold before it: models were trained so


class ChatTemplate:
    """One compiled template. Raises jinja2.TemplateSyntaxError. `reads`: the variables it reads."""

    def __init__(self, source: str) -> None:
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.source = source
        self.reads = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self._template = environment.from_string(source)

    def conversation(self, messages: Sequence[Message], variables: Mapping[str, Any], final: bool = False) -> str:
        """The prompt of a conversation in which every message's text is said. RequestError names the message the template passes over.

        Contents are texts. A template that wants lists of parts gets them. A developer's message is the system's where the template does
        not know the role. `variables` are what the template may read beside `messages`; `final`: the last message is left open.
        """
        messages = [_alias({key: value for key, value in message.items() if value is not None}) for message in messages]
        if not re.search(r"""["']developer["']""", self.source):
            messages = _without_developer(messages)
        rendered, unsaid = self._said(messages, variables, final)
        if unsaid is None:
            return rendered
        parts = [{**message, "content": _parts(message.get("content"))} for message in messages]
        try:
            again, still = self._said(parts, variables, final)
        except Exception:  # it is not one that wants parts
            still = unsaid
        if still is None:
            return again
        place, what = unsaid
        raise RequestError(
            f"messages[{place}]: the chat template leaves {what} of this {messages[place].get('role')} message out of the prompt;"
            " give it a role the template has a place for, or use another chat template",
            param=f"messages[{place}]",
        )

    def _said(self, messages: Sequence[Message], variables: Mapping[str, Any], final: bool) -> tuple[str, tuple[int, str] | None]:
        rendered = self.render(messages, variables, final)
        # The same conversation with a mark for each text: a short text may be in the prompt by chance, a mark is not.
        marked = [{**message, "content": _mark(message.get("content"), place)} for place, message in enumerate(messages)]
        try:
            marks: str | None = self.render(marked, variables, final)
        except Exception:  # it looks into the texts and wants other ones
            marks = None
        return rendered, _unsaid(messages, rendered, marks)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any], final: bool = False) -> str:
        """What the template makes of the messages as they are."""
        if not final:
            return self._template.render({**variables, "messages": messages})
        last = messages[-1].get("content")
        if last is None or "content" not in self.source:
            raise ValueError("the final message has no content to continue, or the template does not read it")
        if not isinstance(last, str):
            opened: Any = [*last[:-1], {**last[-1], "text": last[-1]["text"] + TAG}]
            last = last[-1]["text"]
        else:
            opened = last + TAG
        rendered: str = self._template.render({**variables, "messages": [*messages[:-1], {**messages[-1], "content": opened}]})
        place = rendered.rfind(TAG.strip())
        if place < 0 or last.strip() not in rendered:
            raise ValueError("the final message does not appear in the prompt, so it cannot be continued")
        kept = rendered[place : place + len(TAG)] == TAG  # else the template trims what it is given
        return rendered[:place] if kept else rendered[:place].rstrip()


def read_template(given: str | Path) -> str:
    """A Jinja text is told from a path by its braces."""
    if isinstance(given, str) and "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as wrong:
        raise ConfigError(f"chat_template: {given!s} is neither a template nor a readable file", param="chat_template") from wrong


def compiled(path: Path, found: str | Mapping[str, str] | None, given: str | Path | None) -> dict[str, ChatTemplate]:
    """Templates by name: those found in a model's directory, or the one `given` by the deployment instead."""
    texts = found if given is None else read_template(given)
    try:
        return {name: ChatTemplate(text) for name, text in ({"default": texts} if isinstance(texts, str) else texts or {}).items()}
    except jinja2.TemplateError as wrong:
        line = f", line {wrong.lineno}" if isinstance(wrong, jinja2.TemplateSyntaxError) else ""
        if given is None:
            raise CheckpointError(f"the chat template of {path} is not a Jinja template{line}: {wrong}; set model.chat_template") from wrong
        raise ConfigError(f"chat_template is not a Jinja template{line}: {wrong}", param="chat_template") from wrong


def _alias(message: Message) -> Message:
    """Reasoning under the names templates read, as transformers gives it to them."""
    said = next((message[name] for name in REASONING if name in message), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


def _without_developer(messages: Sequence[Message]) -> list[Message]:
    """A developer's message as the system's; right behind a system message it goes on with that one, for most templates take one alone."""
    told: list[Message] = []
    for message in messages:
        if message.get("role") == "developer":
            message = {**message, "role": "system"}
            before, now = told[-1] if told else {}, message.get("content")
            if before.get("role") == "system" and isinstance(before.get("content"), str) and isinstance(now, str):
                told[-1] = {**before, "content": f"{before['content']}\n\n{now}"}
                continue
        told.append(message)
    return told


def _parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _texts(content: object) -> list[str]:
    """The texts of a content: itself, or that of each of its parts."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, (list, tuple)) else ()
    return [str(part.get("text") or "") if isinstance(part, Mapping) else "" for part in parts]


def _mark(content: object, place: int) -> object:
    """A content of the same shape whose texts nobody else writes."""
    if isinstance(content, (list, tuple)):
        marks = [_name(place, at) for at in range(len(content))]
        return [{**p, "text": m} if isinstance(p, Mapping) and "text" in p else p for p, m in zip(content, marks, strict=True)]
    return _name(place, 0) if isinstance(content, str) and content.strip() else content


def _name(place: int, part: int) -> str:
    return f"\ue0a7{place}.{part}\ue0a8"


def _unsaid(messages: Sequence[Message], rendered: str, marks: str | None) -> tuple[int, str] | None:
    """The first message of which something is not in the prompt, and what."""
    squeezed: str | None = None
    for place, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and str(function.get("name")) not in rendered:
                return place, f"the call of {function.get('name')}"
        content = message.get("content")
        texts = [text.strip() for text in _texts(content)]
        for part, text in enumerate(texts):
            if not text:
                continue
            if marks is not None and _name(place, part) not in marks:
                return place, "the text"
            if text in rendered or json.dumps(text, ensure_ascii=False)[1:-1] in rendered:
                continue
            if message.get("role") == "assistant":  # of an earlier answer the thoughts may go
                text = text.rpartition(THOUGHT)[2].strip().rpartition("\n")[2]
            if squeezed is None:
                squeezed = "".join(rendered.split())
            if "".join(text.split()) not in squeezed:
                return place, "text"
    return None


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What transformers lets a template use."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; what is inside is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> Any:
        return caller()


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    def __call__(self, *args: Any, **words: Any) -> dict[Any, Any]:
        return dict(*args, **words)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's own, without names that begin with an underscore."""

    def __init__(*args: Any, **words: Any) -> None:  # noqa: B902  (so that a namespace may have a `self`, as Jinja's own)
        attributes = dict(*args[1:], **words)
        for name in attributes:
            _check(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace of a chat template cannot hold {name!r}; names must not begin with _")
