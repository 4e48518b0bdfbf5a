"""Chat templates: prompts equal to transformers', every message's text in them or a refusal that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rayneuron.errors import CheckpointError, ConfigError, RequestError
from rayneuron.text.chat_template import ChatTemplate
from rayneuron.text.text import Text, check
from tests.api import spelling
from tests.drawn import examples
from tests.text.chat_templates import PARTS, TEMPLATES

WORDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tools": None, "documents": None, "add_generation_prompt": True}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(spelling.byte_level(tmp_path_factory.mktemp("template")))


@pytest.fixture(scope="module")
def templates(smollm2: Path) -> dict[str, str]:
    """All of them, and SmolLM2's own."""
    own = json.loads((smollm2 / "tokenizer_config.json").read_text())["chat_template"]
    return {**TEMPLATES, "smollm2": own, "parts": PARTS}


def their_prompt(theirs: PreTrainedTokenizerFast, source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """None where the template refuses."""
    try:
        options = {"add_generation_prompt": True} | options
        rendered: str = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
        return rendered
    except Exception:
        return None


ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
SAID = st.sampled_from(
    ["hi", "a", "", " ", "user", "  two  words \n", 'a "quoted" \\ text', "水 é", "<think>so\nit is</think>\n\nyes", "<|im_end|>", "1\n2"]
)


def orderly(roles: list[str]) -> list[str]:
    """Roles as every template wants them."""
    return ["user" if place % 2 == 0 else "assistant" for place in range(len(roles))]


def left(message: dict[str, str]) -> str:
    """What of a message must be said: of an earlier answer not its thoughts."""
    text = message["content"]
    return (text.rpartition("</think>")[2] if message["role"] == "assistant" else text).strip()


def spoken(text: str, rendered: str) -> bool:
    return text in rendered or json.dumps(text, ensure_ascii=False) in rendered


DRAWN = {"roles": st.lists(ROLES, min_size=1, max_size=6), "tidy": st.booleans(), "generate": st.booleans(), "data": st.data()}
NAMES = [*TEMPLATES, "smollm2", "parts"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(**DRAWN)
def test_every_text_is_said_or_refused(templates: dict[str, str], theirs: PreTrainedTokenizerFast, name: str, **drawn: Any) -> None:
    say_or_refuse(templates[name], theirs, name, **drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@examples(300)
@given(**DRAWN)
def test_said_or_refused_at_length(templates: dict[str, str], theirs: PreTrainedTokenizerFast, name: str, **drawn: Any) -> None:
    say_or_refuse(templates[name], theirs, name, **drawn)


def say_or_refuse(
    source: str, theirs: PreTrainedTokenizerFast, name: str, roles: list[str], tidy: bool, generate: bool, data: st.DataObject
) -> None:
    """Our prompt is transformers'; where their prompt would lack a message, also one with a text that stands there by chance, we refuse."""
    template = ChatTemplate(source)
    roles = orderly(roles) if tidy else roles
    messages = [{"role": role, "content": data.draw(SAID)} for role in roles]
    try:
        ours: str | None = template.conversation([dict(message) for message in messages], {**WORDS, "add_generation_prompt": generate})
    except RequestError as wrong:
        assert wrong.param is not None and wrong.param.startswith("messages[") and wrong.param in wrong.message
        ours = None
    except Exception:  # the template's own refusal, which `Text.chat` words
        ours = None
    if "developer" in roles and name != "developer":
        if ours is not None:
            assert all(spoken(left(message), ours) for message in messages)
        return
    if name == "parts":
        if not any(message["content"].strip() for message in messages):
            return  # nothing to lose, and nothing to learn what it wants from
        messages = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    expected = their_prompt(theirs, source, messages, add_generation_prompt=generate)
    # What a template does with these roles, told apart from what these texts happen to be.
    marked = [{"role": role, "content": f"\u2603{place}\u2603"} for place, role in enumerate(roles)]
    if name == "parts":
        marked = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in marked]
    drawn = their_prompt(theirs, source, marked, add_generation_prompt=generate)
    texts = [message["content"] if isinstance(message["content"], str) else message["content"][0]["text"] for message in messages]
    whole = expected is not None and drawn is not None
    for place, (text, message) in enumerate(zip(texts, messages, strict=True)):
        told = {"role": message["role"], "content": text}
        whole = whole and (not text.strip() or (f"\u2603{place}\u2603" in str(drawn) and spoken(left(told), str(expected))))
    if name == "cut":  # its marks fit, its texts do not
        whole = expected is not None and all(spoken(left(message), expected) for message in messages)
    assert ours == (expected if whole else None)


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("last", ["one, two", "one, two  ", "<think>x</think>y"])
def test_a_final_message_that_goes_on_equals_transformers(theirs: PreTrainedTokenizerFast, name: str, last: str) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": last}]
    expected = their_prompt(theirs, TEMPLATES[name], messages, add_generation_prompt=False, continue_final_message=True)
    try:
        ours: str | None = ChatTemplate(TEMPLATES[name]).conversation(messages, {**WORDS, "add_generation_prompt": False}, final=True)
    except Exception:
        ours = None
    if expected is None or spoken(last.strip(), expected):  # what a template cuts off a message that is to go on is refused
        assert ours == expected


def test_tools_documents_and_variables_equal_transformers(theirs: PreTrainedTokenizerFast) -> None:
    source = "{{ tools | tojson }}{{ documents }}{{ mood }}{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
    source += "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"
    source += "{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f", "description": "é<>", "parameters": {"type": "object"}}}]
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": ["x", 1.5, None, True]}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    messages += [{"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "r", "name": None}]
    asked: dict[str, Any] = {"tools": tools, "documents": [{"title": "t", "text": "d"}], "mood": {"a": 1}, "bos_token": "B"}
    expected = their_prompt(theirs, source, messages, **asked)
    assert expected is not None and ChatTemplate(source).conversation(messages, {**WORDS, **asked}) == expected
    with pytest.raises(RequestError, match=r"messages\[1\]: the chat template leaves the call of f "):
        ChatTemplate(TEMPLATES["chatml"]).conversation([messages[0], {**messages[1], "content": ""}], WORDS)


def test_a_developer_is_the_system_where_no_template_knows_him() -> None:
    def said(name: str, *messages: tuple[str, str]) -> str:
        return ChatTemplate(TEMPLATES[name]).conversation([{"role": role, "content": content} for role, content in messages], WORDS)

    ask = ("user", "q")
    assert said("developer", ("developer", "x"), ask) == "<dev>x<u>q"
    for name in ("chatml", "zephyr", "llama-2", "llama-3", "mistral, system last"):
        assert said(name, ("developer", "x"), ask) == said(name, ("system", "x"), ask)
        assert said(name, ("system", "a"), ("developer", "b"), ask) == said(name, ("system", "a\n\nb"), ask)
    with pytest.raises(RequestError, match=r"messages\[0\]: the chat template leaves the text of this system message out"):
        said("phi-3", ("developer", "x"), ask)
    with pytest.raises(Exception, match="System role not supported"):
        said("gemma", ("developer", "x"), ask)


def test_templates_of_a_directory(tmp_path: Path, theirs: PreTrainedTokenizerFast) -> None:
    """Files before tokenizer_config.json, several by name, the one for tools; what is no template is refused before anything is loaded."""
    several = [{"name": "default", "template": TEMPLATES["chatml"]}, {"name": "tool_use", "template": "{{ tools }}" + TEMPLATES["zephyr"]}]
    spelling.byte_level(tmp_path, words={"chat_template": several})
    messages, tools = [{"role": "user", "content": "q"}], [{"type": "function", "function": {"name": "f"}}]

    def same(**asked: Any) -> bool:
        named = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        told = named.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **asked)
        text = Text(tmp_path)
        return text.decode(text.chat(messages, **asked), skip_special_tokens=False) == told

    assert same() and same(tools=tools) and same(chat_template="tool_use")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="several chat templates and none is the default: short"):
        Text(tmp_path).chat(messages)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["llama-3"])
    assert same() and same(chat_template="short")
    (tmp_path / "chat_template.jinja").write_text("{% if x %}\n{{ y ")
    for opened in (Text, check):
        with pytest.raises(CheckpointError, match=r"is not a Jinja template, line 2: .*; set model\.chat_template"):
            opened(tmp_path)
        with pytest.raises(ConfigError, match="chat_template is not a Jinja template, line 1"):
            opened(tmp_path, chat_template="{% for %}")
    assert Text(tmp_path, chat_template=TEMPLATES["chatml"]).chat(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ messages.append(1) }}",
        "{{ dict.__init__.__globals__ }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(theirs: PreTrainedTokenizerFast, source: str) -> None:
    messages = [{"role": "user", "content": "q"}]
    assert their_prompt(theirs, source, messages) is None
    with pytest.raises(Exception, match="unsafe|underscore|must not begin|Range|has no attribute"):
        ChatTemplate(source).render(messages, WORDS)
