"""HuggingFace's generate() over our engine: batches, sampling keywords, streamers, stopping criteria.

Shapes: B prompts, N sequences a prompt, L tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rayneuron.constraints import Beams
from rayneuron.engine.scores import by_step
from rayneuron.errors import RequestError
from rayneuron.hf_rows import adapters_of, inferred, pad_id, padded, prompts_of
from rayneuron.llm import LLM
from rayneuron.types import Request, SamplingParams

# transformers' name -> ours; the value is taken as it is.
_SAME = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "top_p": "top_p",
    "top_k": "top_k",
    "temperature": "temperature",
    "min_new_tokens": "min_tokens",
}
_LENGTHS = ("max_length", "max_new_tokens", "min_length")
_OTHER = ("do_sample", "num_return_sequences", "eos_token_id", "pad_token_id", "bos_token_id", "bad_words_ids", "suppress_tokens", "seed")
_BEAMS = ("num_beams", "length_penalty", "early_stopping")
_ENDS = ("max_time", "stop_strings")
_TOLD = ("return_dict_in_generate", "output_scores", "output_logits")
_SET = {*_SAME, *_LENGTHS, *_OTHER, *_BEAMS, *_ENDS, *_TOLD}
Criterion = Callable[..., Any]  # (ids [1, tokens so far], None) -> whether it ends here
# How transformers drafts, which changes no token, and what it accepts; here the deployment says it, by speculative_config.
_COUNT = lambda value: type(value) is int and value > 0, "a whole number above 0"  # noqa: E731
_COUNTS = ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens", "assistant_lookbehind", "target_lookbehind")
_SCHEDULES = ("constant", "heuristic", "heuristic_transient")
_DRAFTING: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys((*_COUNTS, "assistant_early_exit"), _COUNT),
    "num_assistant_tokens_schedule": (lambda value: value in _SCHEDULES, f"one of {', '.join(_SCHEDULES)}"),
    "assistant_confidence_threshold": (lambda value: type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1"),
}
# What a GenerationConfig may hold that changes nothing here when it has this value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_cache": (None, True),
}


class Generated(dict[str, Any]):
    """What generate(return_dict_in_generate=True) gives, by name, index or attribute: `sequences` [B*N, L'] int64; `scores` and `logits`,
    where asked for, None else: of each step what tokens were chosen from and what the model said [B*N, V]. Of a row that has ended: 0
    for the pad token, -inf for all others."""

    def __getattr__(self, name: str) -> Any:
        if name in ("sequences", "scores", "logits"):
            return self.get(name)
        raise AttributeError(name)


class HuggingFaceGenerationAdapter:
    """`generate()` of a transformers model, run by an `LLM`. Greedy and multinomial sampling, and beam search.

    >>> model = HuggingFaceGenerationAdapter(LLM("demo:smollm2"))
    >>> model.generate(tokenizer("Hello", return_tensors="pt").input_ids, max_new_tokens=8)
    """

    def __init__(self, llm: LLM, generation_config: Any = None) -> None:
        self.llm = llm
        self.generation_config = generation_config
        self.device = torch.device("cpu")

    def reset_generation(self) -> None:
        """Nothing to reset: every call has its own KV. Kept for programs written for transformers-neuronx."""

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: Any = None,
        streamer: Any = None,
        stopping_criteria: Iterable[Callable[..., Any]] | None = None,
        adapter_ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """input_ids [B, L] (padded on either side, or not) -> [B*N, L'] int64: prompt and output, right-padded with pad_token_id; in
        `Generated` with return_dict_in_generate, with what output_scores and output_logits ask for.
        Without `attention_mask`, a pad_token_id that is no EOS marks padding.

        Settings come from the model's generation_config, then `generation_config`, then keywords. `streamer` (put, end) needs one sequence.
        `stopping_criteria` are called after every token with ([1, tokens so far], None), those of `max_time` (seconds) and `stop_strings`
        too; `tokenizer` decodes for the latter, where it is not the model's own. `adapter_ids`: for each prompt one of `lora.lora_modules`,
        None for none. Raises RequestError for what cannot be honoured.
        """
        tokenizer = kwargs.pop("tokenizer", None) or self.llm.text
        if kwargs.pop("assistant_model", None) is not None:
            _check_drafts(self.llm)
        settings = _merge(self.llm.generation, self.generation_config, generation_config, kwargs)
        prompts = prompts_of(input_ids, inferred(input_ids, settings) if attention_mask is None else attention_mask)
        each = [_params(settings, len(p), input_ids.shape[1], self.llm.max_model_len) for p in prompts]
        requests = [self.llm.request(*one) for one in zip(prompts, each, adapters_of(adapter_ids, len(prompts)), strict=True)]
        for request in requests:
            self.llm.engine.validate(request)
        copies = settings.get("num_return_sequences") or 1
        if streamer is not None and len(prompts) * copies > 1:
            raise RequestError(f"a streamer needs one sequence, got {len(prompts)} prompts x {copies}", param="streamer")
        criteria = [*(stopping_criteria or ()), *_ends(settings, tokenizer.decode)]
        if requests[0].params.beams is not None and (streamer is not None or criteria):
            name = "streamer" if streamer is not None else next((n for n in _ENDS if settings.get(n)), "stopping_criteria")
            raise RequestError(f"{name} sees tokens as they come, and those of a beam search come at its end; leave it out", param=name)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        wanted = _wanted(settings)
        made, rows = self._run(requests, streamer, criteria, bool(wanted))
        if streamer is not None:
            streamer.end()
        pad = pad_id(settings, self.llm.text.eos_ids)
        choices = [(r, made[r.id, i], rows.get(r.id, {}).get(i, [])) for r in requests for i in range(copies)]
        sequences = padded(input_ids, [tokens for _, tokens, _ in choices], copies, pad)
        if not settings.get(_TOLD[0]):
            return sequences
        eos = {"scores": self.llm.text.eos_ids}  # of logits nothing is edited
        return Generated(sequences=sequences, **{name: by_step(choices, eos.get(name), pad) for name in wanted})

    def _run(
        self, requests: list[Request], streamer: Any, criteria: list[Criterion], kept: bool
    ) -> tuple[dict[tuple[str, int], list[int]], dict[str, dict[int, list[Tensor]]]]:
        """The tokens of every choice, and if they are to be kept the logits of each, by request and choice."""
        if not kept:
            return self._tokens(requests, streamer, criteria), {}
        try:
            for request in requests:
                self.llm.engine.host.kept.ask(request.id)
            made = self._tokens(requests, streamer, criteria)
        finally:
            rows = {request.id: self.llm.engine.host.kept.take(request.id) for request in requests}
        return made, rows

    def _tokens(self, requests: list[Request], streamer: Any, criteria: list[Criterion]) -> dict[tuple[str, int], list[int]]:
        prompts = {r.id: r.prompt_ids for r in requests}
        made: dict[tuple[str, int], list[int]] = {(r.id, i): [] for r in requests for i in range(r.params.n)}
        stopped = set()
        for delta in self.llm.tokens(requests):
            choice = (delta.request_id, delta.index)
            if choice in stopped:  # a token that was on its way when a criterion ended the sequence
                continue
            for left, token in reversed(tuple(enumerate(reversed(delta.token_ids)))):
                made[choice].append(token)
                if streamer is not None:
                    streamer.put(torch.tensor([token]))
                if (left or delta.finish_reason is None) and _stop(criteria, [*prompts[delta.request_id], *made[choice]]):
                    stopped.add(choice)
                    self.llm.abort(*choice)
                    break
        return made


def _wanted(settings: dict[str, Any]) -> list[str]:
    """What of every step is to be returned beside the tokens."""
    return [name.removeprefix("output_") for name in _TOLD[1:] if settings.get(name) and settings.get(_TOLD[0])]


def _check_drafts(llm: LLM) -> None:
    """Which model drafts the deployment says, since it loads it; which tokens come does not depend on it. Raises RequestError."""
    said = llm.config.speculative_config
    if said is None or not said.by_model:
        wanted = "LLM(path, speculative_config={'model': its directory, 'num_speculative_tokens': 4})"
        raise RequestError(f"generate(assistant_model=...) needs an LLM that has loaded it; write {wanted}", param="assistant_model")


def _merge(model: dict[str, Any], *given: Any) -> dict[str, Any]:
    """Later sources win; None means not set. Raises RequestError for a name or value that would be ignored."""
    settings = {k: v for k, v in model.items() if k in _SET}
    for source in (one for one in given if one is not None):
        strict = isinstance(source, dict)
        values = source if strict else source.to_diff_dict()
        for name, value in values.items():
            if name in _SET:
                if value is not None:
                    settings[name] = value
            elif name in _DRAFTING:
                if value is not None and not _DRAFTING[name][0](value):
                    raise RequestError(f"{name} must be {_DRAFTING[name][1]}, got {value!r:.80}", param=name)
            elif name in _NEUTRAL:
                if value not in _NEUTRAL[name]:
                    raise RequestError(f"generate({name}={value!r}) is not supported; leave it out", param=name)
            elif strict:
                raise RequestError(f"generate() does not know {name!r}; known are {', '.join(sorted(_SET))}", param=name)
    return settings


def _params(settings: dict[str, Any], prompt: int, width: int, most: int) -> SamplingParams:
    sampling = bool(settings.get("do_sample"))
    if settings.get("max_new_tokens") is not None:
        new = settings["max_new_tokens"]
    else:
        new = settings.get("max_length", width + 20) - width  # transformers' default is 20 tokens beyond the prompt
    if new < 1:
        raise RequestError(
            f"max_length {settings['max_length']} leaves no room after {width} prompt tokens; set max_new_tokens", param="max_length"
        )
    values = {ours: settings[theirs] for theirs, ours in _SAME.items() if theirs in settings}
    if not sampling:
        values |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    elif "top_k" not in settings:
        values["top_k"] = 50  # transformers' default
    beams = _beams(settings, sampling)
    eos = settings.get("eos_token_id")
    shortest = max(settings.get("min_length", 0) - prompt, values.pop("min_tokens", 0))
    return SamplingParams(
        **values,
        beams=beams,
        logprobs=0 if _wanted(settings) else None,  # so that logits come to the host
        n=settings.get("num_return_sequences") or 1,
        max_tokens=min(new, most - prompt),
        min_tokens=max(shortest, 0),
        seed=settings.get("seed"),
        stop_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        ignore_eos=eos is not None,
        bad_words_ids=tuple(tuple(w) for w in settings.get("bad_words_ids") or ()),
        banned_token_ids=tuple(settings.get("suppress_tokens") or ()),
    )


def _beams(settings: dict[str, Any], sampling: bool) -> Beams | None:
    width = settings.get("num_beams") or 1
    if width == 1:
        return None
    for name in _wanted(settings):
        raise RequestError(f"output_{name} of a beam search are not kept; leave it out, or num_beams", param=f"output_{name}")
    if sampling:
        raise RequestError("beams are not sampled: leave do_sample out, or num_beams", param="num_beams")
    return Beams(width=width, length_penalty=settings.get("length_penalty", 1.0), early_stopping=settings.get("early_stopping", False))


def _ends(settings: dict[str, Any], decode: Callable[..., str]) -> Iterator[Criterion]:
    """The criteria of `max_time` and `stop_strings`, by transformers' rules: the token that is late, or completes a string, is the last."""
    most_s, strings = (settings.get(name) for name in _ENDS)
    if most_s is not None:
        if isinstance(most_s, bool) or not isinstance(most_s, int | float) or not most_s > 0:
            raise RequestError(f"max_time must be a number of seconds above 0, got {most_s!r:.80}", param="max_time")
        late = time.monotonic() + most_s
        yield lambda ids, scores: time.monotonic() > late
    strings = [strings] if isinstance(strings, str) else list(strings or ())
    if not all(isinstance(text, str) and text for text in strings):
        raise RequestError(f"stop_strings must be texts that are not empty, got {strings!r:.80}", param="stop_strings")
    if strings:
        yield lambda ids, scores: _completes(strings, ids[0].tolist(), decode)


def _completes(strings: list[str], ids: list[int], decode: Callable[..., str]) -> bool:
    """Whether the last of the ids completes one of the strings."""
    tail = ids[-8 - max(len(text.encode()) for text in strings) :]  # of an id that is text a byte at least
    now, before = decode(tail), len(decode(tail[:-1]))
    return any(now.find(text, max(0, before - len(text) + 1)) >= 0 for text in strings)


def _stop(criteria: list[Criterion], ids: list[int]) -> bool:
    if not criteria:
        return False
    so_far = torch.tensor([ids])
    return any(bool(torch.as_tensor(criterion(so_far, None)).all()) for criterion in criteria)
