"""`/v1/completions`: prompts in four forms, echo, and the text_completion object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rayneuron.api.beams import check_best_of, read_best_of
from rayneuron.api.body import cut, fit, read_common, read_logprob_ids, read_logprobs, reply_id, truncate
from rayneuron.api.call import Answer, Call, Context, Json
from rayneuron.api.choices import Choice, Gathered, Offsets, completion_logprobs, gather, prompt_table
from rayneuron.api.fields import Fields, token_ids, wrong
from rayneuron.api.openai.events import Events, Writers, frame
from rayneuron.api.stream import ChoiceState
from rayneuron.api.unserved import COMPLETIONS
from rayneuron.errors import RequestError
from rayneuron.types import Delta, Request, SamplingParams, TokenLogprobs

MAX_TOKENS = 16  # OpenAI's default of this endpoint
FORMS = "a string, an array of strings, token ids, or an array of arrays of token ids"

Prompts = list[tuple[str | None, list[int]]]


def parse(
    body: Mapping[str, Any], context: Context, *, request_id: str, created: int, client_id: str | None = None, max_tokens: int = MAX_TOKENS
) -> Call:
    """A completion body as a call; RequestError names the wrong field. `max_tokens`: the endpoint's default where the model has none."""
    fields = Fields(body)
    best = read_best_of(fields) if "best_of" in fields else 0
    head, words = read_common(fields, context, COMPLETIONS)
    n = words["n"]
    if best:
        check_best_of(words, head.stream)
        words |= {"n": best, "logprobs": 0}
    fields.refuse("prompt_embeds")
    echo, logprobs, shown = fields.flag("echo"), read_logprobs(fields, "logprobs"), words.get("prompt_logprobs")
    if logprobs is not None:
        words["logprobs"] = logprobs
        if echo:
            words["prompt_logprobs"] = max(logprobs, shown or 0)
    listed = words["logprob_token_ids"] = read_logprob_ids(fields, context, logprobs)
    if echo and listed:
        raise RequestError("logprob_token_ids tells of the output alone; leave it or echo out", param="logprob_token_ids")
    asked = fields.integer("max_tokens", low=0)
    if asked == 0 and not echo:
        raise RequestError("max_tokens must be at least 1, or 0 together with echo: true to score the prompt only", param="max_tokens")
    default = context.defaults.get("max_tokens", max_tokens)
    prompts = read_prompts(fields, context, default if asked is None else asked)
    lengths = [fit(words, len(ids), asked, default, context.max_model_len) for _, ids in prompts]
    params = {tokens: SamplingParams(**words, max_tokens=tokens) for tokens in set(lengths)}  # each once: they may hold a vocabulary
    common: dict[str, Any] = {"priority": head.priority, "cache_salt": head.cache_salt, "adapter": head.adapter}
    requests = [
        Request(id=f"{request_id}-{place}", prompt_ids=ids, params=params[tokens], **common)
        for place, ((_, ids), tokens) in enumerate(zip(prompts, lengths, strict=True))
    ]
    echoed, offsets = _echo(prompts, context, words["skip_special_tokens"], logprobs is not None) if echo else ((), ())
    return Call(
        id=reply_id("cmpl", head, client_id, request_id),
        created=created,
        head=head,
        n=n,
        choices=n * len(requests),
        best=best,
        requests=requests,
        text=context.text,
        answer=ANSWER,
        logprobs=len(listed) or logprobs,
        prompt_logprobs=shown,
        echo=echoed,
        echo_offsets=offsets,
        unknown=fields.unknown,
    )


def read_prompts(fields: Fields, context: Context, output: int, field: str = "prompt") -> Prompts:
    """Every prompt as (its text, where it came as text and stays whole; its ids)."""
    given, special = fields.take(field), fields.flag("add_special_tokens", True)
    keep, side = truncate(fields, context, output)
    items = _items(given, field)
    if len(items) > context.max_prompts:
        raise RequestError(f"{field} may hold at most {context.max_prompts} prompts, got {len(items)}", param=field)
    read: Prompts = []
    for place, item in enumerate(items):
        name = field if items is not given else f"{field}[{place}]"
        if isinstance(item, str):
            limit, cutting = (context.max_model_len, None) if keep is None else (keep, side)
            text, ids = item, context.text.encode(item, special, limit, cutting)
        else:
            text, ids = None, token_ids(name, item, context.vocab_size, context.most_ids)
        if not item or not ids:  # a text without characters is refused even where the tokenizer would add BOS, as vLLM does
            raise RequestError(f"{name} is empty; send at least one token", param=field)
        kept = cut(ids, keep, side)
        read.append((text if kept is ids else None, kept))
    return read


def _items(given: object, field: str) -> list[Any]:
    """The prompts of the four forms: text, texts, ids, arrays of ids."""
    if given is None or given == []:
        raise RequestError(f"{field} is required: {FORMS}", param=field)
    if isinstance(given, str):
        return [given]
    if isinstance(given, list):
        if type(given[0]) is int:
            return [given]
        if all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
            return given
    wrong(field, FORMS, given)


def _echo(prompts: Prompts, context: Context, skip: bool, offsets: bool) -> tuple[tuple[str, ...], tuple[list[int], ...]]:
    """The prompts as text, and with `offsets` where each of their tokens begins in it.

    A text stays as it came; ids, and what is left of a text that was cut, are spelled (U+FFFD where one ends inside a character). With
    offsets so is a text the tokenizer does not give back as it was.
    """
    if not offsets:
        return tuple(context.text.decode(ids, skip_special_tokens=skip) if text is None else text for text, ids in prompts), ()
    texts, places = zip(*(_spelled(text, ids, context, skip) for text, ids in prompts), strict=True)
    return texts, places


def _spelled(text: str | None, ids: list[int], context: Context, skip: bool) -> tuple[str, list[int]]:
    spelled, offsets = _spell(ids, context, skip)
    if text is not None and spelled != text:
        plain = context.text.encode(text, add_special_tokens=False)  # special tokens the caller wrote himself are part of his text
        whole, inside = _spell(plain, context, False)
        for added in range(len(ids) - len(plain) + 1):
            if whole == text and ids[added : added + len(plain)] == plain:
                return text, [0] * added + inside + [len(text)] * (len(ids) - len(plain) - added)
    return spelled, offsets


def _spell(ids: list[int], context: Context, skip: bool) -> tuple[str, list[int]]:
    words, text, offsets = context.text.detokenizer([], skip), "", []
    for token_id in ids:
        offsets.append(len(text))
        text += words.push(token_id)
    return text + words.flush(), offsets


def _reply(call: Call, deltas: Iterable[Delta]) -> Json:
    gathered = gather(call, deltas)
    choices = [_finished(call, gathered, choice) for choice in gathered.choices]
    return {**frame(call, "text_completion", choices), "usage": gathered.usage, "system_fingerprint": None}


def _finished(call: Call, gathered: Gathered, choice: Choice) -> Json:
    prompt = gathered.prompt_logprobs.get(choice.prompt)
    written: Json = {
        "index": choice.index,
        "text": (call.echo[choice.prompt] if call.echo else "") + choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if call.logprobs is not None:
        echoed = prompt if call.echo else None
        written["logprobs"] = _logprobs(call, choice.prompt, echoed, choice.token_ids, choice.logprobs, Offsets(call, choice.prompt))
    if call.prompt_logprobs is not None:
        written["prompt_logprobs"] = None if prompt is None else prompt_table(call, prompt)
    if call.head.return_token_ids:
        written["token_ids"] = choice.token_ids
        written["prompt_token_ids"] = call.requests[choice.prompt].prompt_ids
    return written


def _logprobs(
    call: Call, prompt: int, echoed: list[TokenLogprobs | None] | None, ids: list[int], entries: list[TokenLogprobs], offsets: Offsets
) -> Json:
    """Probabilities of the output, after those of the echoed prompt where there is one."""
    places = [offsets.of(token_id) for token_id in ids]
    if echoed is None:
        return completion_logprobs(call, ids, entries, places)
    return completion_logprobs(call, call.requests[prompt].prompt_ids + ids, [*echoed, *entries], call.echo_offsets[prompt] + places)


def _chunk(call: Call, progress: ChoiceState, delta: Delta, echoed: list[TokenLogprobs | None] | None) -> Json:
    text = delta.text if progress.begun or not call.echo else call.echo[progress.prompt] + delta.text
    written: Json = {
        "index": progress.index,
        "text": text,
        "logprobs": None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    if call.logprobs is not None:
        progress.offsets = progress.offsets or Offsets(call, progress.prompt)
        written["logprobs"] = _logprobs(call, progress.prompt, echoed, delta.token_ids, delta.logprobs or [], progress.offsets)
    if call.head.return_token_ids:
        written["token_ids"] = delta.token_ids
        if not progress.begun:
            written["prompt_token_ids"] = call.requests[progress.prompt].prompt_ids
    return written


def _wrap(call: Call, choices: list[Json]) -> Json:
    chunk = frame(call, "text_completion", choices)
    if call.head.include_usage:
        chunk["usage"] = None  # the last chunk says it
    return chunk


ANSWER = Answer(_reply, partial(Events, Writers(_wrap, lambda call: [], _chunk)))
