"""`/v1/chat/completions`: messages, and whatever else of a body reaches the chat template; and the chat.completion object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from rayneuron.api.body import cut, fit, read_common, read_logprob_ids, read_logprobs, reply_id, truncate
from rayneuron.api.call import Answer, Call, Context, Json
from rayneuron.api.choices import Choice, chat_logprobs, gather, prompt_table
from rayneuron.api.fields import Fields, wrong
from rayneuron.api.forms import FORMS, THINK, THOUGHT
from rayneuron.api.openai.events import Events, Writers, frame
from rayneuron.api.openai.messages import read_messages
from rayneuron.api.openai.prediction import read_prediction
from rayneuron.api.openai.tools import Tools, read_tools
from rayneuron.api.scan import Event, Scan, Scanner
from rayneuron.api.stream import ChoiceState
from rayneuron.api.unserved import CHAT
from rayneuron.constraints import StructuredOutputs
from rayneuron.errors import RequestError
from rayneuron.types import Delta, Request, SamplingParams, TokenLogprobs

# What has its own field, or is not for a client to say at all.
OWN_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template", "tools", "documents", "messages", "conversation")
RENDERING = (
    *("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length", "add_special_tokens", "tokenizer_kwargs"),
    "self",  # a word of Jinja's own
)


def parse(body: Mapping[str, Any], context: Context, *, request_id: str, created: int, client_id: str | None = None) -> Call:
    """A chat body as a call; RequestError names the wrong field."""
    fields = Fields(body)
    head, words = read_common(fields, context, CHAT)
    budget = fields.integer("thinking_token_budget", low=-1)
    shown = fields.flag("include_reasoning", True)
    modalities = fields.take("modalities", ["text"])
    if modalities != ["text"]:
        wrong("modalities", '["text"]; this model writes text only', modalities)
    logprobs = _read_logprobs(fields)
    if logprobs is not None:
        words["logprobs"] = logprobs
    listed = words["logprob_token_ids"] = read_logprob_ids(fields, context, logprobs)
    asked, name = _max_tokens(fields)
    keep, side = truncate(fields, context, asked or 1)
    predicted = read_prediction(fields, context) if "prediction" in fields else None
    tools = _tools(fields, context)
    scan = context.scan._replace(shown=shown, many=tools.many, tools=tools.form(context.scan) if tools.names else None)
    ids, role = render(fields, context, keep, side, tools.shown)
    ids = cut(ids, keep, side)
    opened = scan.reasoning is not None and context.text.decode(ids[-8:], False).rstrip().endswith(THINK)
    marks = map(context.text.special, scan.marks)
    scan = scan._replace(opened=opened, kept=frozenset(mark for mark in marks if mark is not None))
    said = _constraint(words.get("structured_outputs"), context, scan, tools, -1 if budget is None else budget)
    words |= {} if said is None else {"structured_outputs": said}
    tokens = fit(words, len(ids), asked, context.defaults.get("max_tokens"), context.max_model_len, name)
    params = SamplingParams(**words, max_tokens=tokens)
    common: dict[str, Any] = {"priority": head.priority, "cache_salt": head.cache_salt, "adapter": head.adapter}
    return Call(
        id=reply_id("chatcmpl", head, client_id, request_id),
        created=created,
        head=head,
        n=params.n,
        choices=params.n,
        requests=[Request(id=f"{request_id}-0", prompt_ids=ids, params=params, **common, prediction=predicted)],
        text=context.text,
        answer=ANSWER,
        logprobs=len(listed) or logprobs,
        prompt_logprobs=params.prompt_logprobs,
        role=role,
        scan=scan,
        unknown=fields.unknown,
    )


def _read_logprobs(fields: Fields) -> int | None:
    """Alternatives a token: logprobs switches them on, top_logprobs counts them."""
    on, top = fields.flag("logprobs"), read_logprobs(fields, "top_logprobs")
    if top and not on:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if on else None


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    """The length asked for, and the field that asked; the newer name wins."""
    old, new = fields.integer("max_tokens", low=1), fields.integer("max_completion_tokens", low=1)
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def render(
    fields: Fields, context: Context, keep: int | None = None, side: str = "left", tools: list[Json] | None = None
) -> tuple[list[int], str]:  # fmt: skip
    """Token ids of the body's conversation, and the role that speaks next. `keep`: the caller will cut all but so many, on that `side`."""
    messages = read_messages(fields.take("messages"), context.max_model_len)
    prompt, final = fields.flag("add_generation_prompt", True), fields.flag("continue_final_message")
    if prompt and final:
        raise RequestError("continue_final_message needs add_generation_prompt: false", param="continue_final_message")
    template = fields.string("chat_template")
    if template is not None and not context.trust_chat_template:
        raise RequestError(
            "chat_template is not accepted from clients by this server; leave it out, or set serving.trust_request_chat_template: true",
            param="chat_template",
        )
    ids = context.text.chat(
        messages,
        add_generation_prompt=prompt,
        continue_final_message=final,
        tools=tools or _tools(fields, context).shown,
        documents=_documents(fields),
        chat_template=template,
        add_special_tokens=fields.flag("add_special_tokens"),
        limit=context.max_model_len if keep is None else keep,
        side=None if keep is None else side,
        variables={**context.template_kwargs, **_variables(fields)},
    )
    if not ids:
        raise RequestError("the chat template made an empty prompt of these messages", param="messages")
    return ids, "assistant" if prompt else messages[-1]["role"]


def _tools(fields: Fields, context: Context) -> Tools:
    if "tools" in fields or "tool_choice" in fields:
        return read_tools(fields, context.scan.tools is not None)
    fields.flag("parallel_tool_calls")
    return Tools()


def _constraint(
    said: StructuredOutputs | None, context: Context, scan: Scan, tools: Tools, budget: int
) -> StructuredOutputs | None:  # fmt: skip
    """What an answer must match: a constraint begins behind reasoning, which has at most `budget` tokens (-1: any number)."""
    if tools.forced and said is not None:
        raise RequestError("tool_choice forces a call, which is a form already; leave the other constraint out", param="tool_choice")
    if tools.forced or (tools.strict and said is None):
        said = tools.constraint(FORMS[scan.tools or ""], context.text)
    if scan.reasoning is None:
        if budget >= 0:
            need = "thinking_token_budget needs a server whose file says serving.reasoning_parser; leave it out"
            raise RequestError(need, param="thinking_token_budget")
        return said
    began, ended = (tuple(context.text.encode(mark, False)) for mark in (THINK, THOUGHT))
    limit: Json = {"after": ended, "free_tokens": budget if budget >= 0 else None}
    if said is not None:  # without a beginning the answer is all there is
        return replace(said, **limit) if scan.inside else said
    return StructuredOutputs(**limit, begins=() if scan.inside else began, field="thinking_token_budget") if budget >= 0 else None


def reserved(kwargs: Mapping[str, Any]) -> str | None:
    """A word that is not for the template to be told, if there is one."""
    return next((name for name in (*OWN_FIELDS, *RENDERING) if name in kwargs), None)


def _variables(fields: Fields) -> dict[str, Any]:
    """Words for the template itself."""
    options: dict[str, Any] = dict(fields.table("chat_template_kwargs", {}))
    if (name := reserved(options)) is not None:
        said = "send it as a field of its own" if name in OWN_FIELDS else "leave it out"
        raise RequestError(f"chat_template_kwargs.{name} is not for the template; {said}", param=f"chat_template_kwargs.{name}")
    effort = fields.string("reasoning_effort")
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
    return options


def _documents(fields: Fields) -> list[dict[str, Any]] | None:
    documents = fields.take("documents")
    if documents is not None and (not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents)):
        wrong("documents", "an array of objects", documents)
    found: list[dict[str, Any]] | None = documents
    return found


def _reply(call: Call, deltas: Iterable[Delta]) -> Json:
    gathered = gather(call, deltas)
    reply = frame(call, "chat.completion", [_finished(call, choice) for choice in gathered.choices])
    reply |= {"usage": gathered.usage, "system_fingerprint": None}
    if call.prompt_logprobs is not None:
        prompt = gathered.prompt_logprobs.get(0)
        reply["prompt_logprobs"] = None if prompt is None else prompt_table(call, prompt)
    if call.head.return_token_ids:
        reply["prompt_token_ids"] = call.requests[0].prompt_ids
    return reply


def _finished(call: Call, choice: Choice) -> Json:
    scanner = Scanner(call.scan) if call.scan.on else None
    said: Json = {"content": choice.text}
    if scanner is not None:
        said = {"content": None} | _said(call, choice.index, 0, scanner.push(choice.text, last=True))
    for each in said.get("tool_calls", ()):
        del each["index"]
    written: Json = {
        "index": choice.index,
        "message": {"role": call.role, **said, "refusal": None},
        "logprobs": None if call.logprobs is None else chat_logprobs(call, choice.logprobs),
        "finish_reason": _why(choice.finish_reason, scanner),
        "stop_reason": choice.stop_reason,
    }
    if call.head.return_token_ids:
        written["token_ids"] = choice.token_ids
    return written


def _chunk(call: Call, progress: ChoiceState, delta: Delta, echoed: list[TokenLogprobs | None] | None) -> Json:
    scanner = progress.scanner
    if scanner is None:
        said = {"content": delta.text} if delta.text else {}
    else:
        before = scanner.calls
        said = _said(call, progress.index, before, scanner.push(delta.text, last=delta.finish_reason is not None))
    written: Json = {
        "index": progress.index,
        "delta": said,
        "logprobs": None if call.logprobs is None else chat_logprobs(call, delta.logprobs or ()),
        "finish_reason": _why(delta.finish_reason, scanner),
    }
    if delta.finish_reason is not None:
        written["stop_reason"] = delta.stop_reason
    if call.head.return_token_ids:
        written["token_ids"] = delta.token_ids
    return written


def _said(call: Call, index: int, calls: int, events: Iterable[Event]) -> Json:
    """Events as a message or a delta; `calls` came before them. Reasoning has vLLM's name and that of older clients."""
    said: Json = {}
    for event in events:
        if event.kind == "call":
            name = call.scan.call_id("chatcmpl-tool-", f"{call.id.removeprefix('chatcmpl-')}-{index}", calls)
            function = {"name": event.name, "arguments": ""}
            said.setdefault("tool_calls", []).append({"index": calls, "id": name, "type": "function", "function": function})
            calls += 1
        elif event.kind == "arguments":
            if "tool_calls" not in said:
                said["tool_calls"] = [{"index": calls - 1, "function": {"arguments": ""}}]
            said["tool_calls"][-1]["function"]["arguments"] += event.text
        else:
            for key in ("content",) if event.kind == "content" else ("reasoning", "reasoning_content"):
                said[key] = said.get(key, "") + event.text
    return said


def _why(reason: str | None, scanner: Scanner | None) -> str | None:
    """Why a choice ended: a model that stopped behind a call wants its result."""
    return "tool_calls" if reason == "stop" and scanner is not None and scanner.whole else reason


def _roles(call: Call) -> list[Json]:
    """The chunk each choice begins with."""
    opening = {"role": call.role, "content": ""}
    return [{"index": index, "delta": opening, "logprobs": None, "finish_reason": None} for index in range(call.choices)]


def _wrap(call: Call, choices: list[Json]) -> Json:
    chunk = frame(call, "chat.completion.chunk", choices)
    if call.head.return_token_ids and any("role" in choice["delta"] for choice in choices):
        chunk["prompt_token_ids"] = call.requests[0].prompt_ids
    if call.head.include_usage:
        chunk["usage"] = None  # the last chunk says it
    return chunk


ANSWER = Answer(_reply, partial(Events, Writers(_wrap, _roles, _chunk)))
