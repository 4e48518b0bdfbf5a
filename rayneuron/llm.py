"""LLM: the offline engine in this process."""

from __future__ import annotations

import itertools
import operator
import queue
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec.structs import replace

from rayneuron.api.openai.messages import read_messages
from rayneuron.api.vectors import Form
from rayneuron.config import Deployment, parse
from rayneuron.engine.loop import EngineLoop
from rayneuron.errors import RayNeuronError, RequestError, UnknownModel
from rayneuron.loading import StageProgress, open_engine
from rayneuron.models.config_json import pooling
from rayneuron.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, collect
from rayneuron.seeds import Seeds
from rayneuron.text.assembler import Assembler
from rayneuron.types import Delta, Request, SamplingParams, TokenDelta
from rayneuron.validation import override

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": ...} / {"prompt_token_ids": [...]}
Params = SamplingParams | Mapping[str, Any]
Inbox = queue.SimpleQueue[TokenDelta]

PROMPT = "a prompt is a text, a list of token ids, or a mapping with prompt or prompt_token_ids"
# What vLLM's LLM has besides, and what to write here.
INSTEAD = {
    "get_tokenizer": "llm.text has encode, decode and chat",
    "apply_chat_template": "llm.text.chat(messages) gives token ids",
    "beam_search": "write generate(prompts, SamplingParams(beams=Beams(width=4, rule='vllm'), temperature=0))",
    **dict.fromkeys(("encode", "reward", "classify"), "embed gives the vectors of prompts"),
    "score": "multiply the vectors that embed gives",
    "get_default_sampling_params": "llm.generation holds what generation_config.json says",
    **dict.fromkeys(("llm_engine", "llm_engine_core", "collective_rpc", "apply_model"), "llm.engine is the engine, in this process"),
    **dict.fromkeys(("sleep", "wake_up", "shutdown"), "close() ends the engine and frees its memory; open another one to go on"),
}


class LLM:
    """A model loaded in this process. Thread-safe; prompts of one call, and of concurrent calls, share batches.

    `path`: a model directory, org/name of a hub, or demo:NAME. Further keywords are the keys of a deployment file: dtype, max_model_len,
    max_num_seqs, tensor_parallel, device, threads, buckets={...}, ..., or vLLM's names for them. Raises ConfigError or CheckpointError.

    >>> llm = LLM("demo:smollm2", dtype="fp32", max_model_len=512)
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text
    ' Paris.\\n'
    """

    def __init__(self, path: str | PathLike[str] | None = None, *, progress: StageProgress | None = None, **options: Any) -> None:
        self.config: Deployment = parse(options if path is None else override(options, {"model.path": str(path)}))
        opened = open_engine(self.config, progress)
        self.text = opened.text
        self.path = opened.path
        self.chosen = opened.chosen
        self.arch = opened.arch
        self.generation = opened.generation
        self.seconds = opened.seconds
        self.engine = opened.engine
        self.max_model_len = opened.engine.capacity.length
        self._inboxes: dict[str, Inbox] = {}
        self._numbers = itertools.count()
        self._seeds = Seeds(self.config.seed)
        self._loop = EngineLoop(self.engine, self._deliver)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """AttributeError, and of what vLLM's has, what to write."""
            raise AttributeError(f"LLM has no {name}" + (f": {INSTEAD[name]}" if name in INSTEAD else ""))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params | Sequence[Params] | None = None, *, use_tqdm: bool = False,
        adapter: str | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Complete every prompt; results in the order of the prompts. `sampling_params`: one for all or one a prompt; `adapter`: its name.

        Without, they are SamplingParams() (16 tokens at temperature 1). Raises RequestError for a wrong prompt or parameter before
        anything runs.
        """
        many = _listed(prompts)
        each = _matched(sampling_params, len(many))
        return self._all([self._request(p, s, adapter) for p, s in zip(many, each, strict=True)], use_tqdm)

    def chat(
        self, messages: Sequence[Any], sampling_params: Params | Sequence[Params] | None = None, *, use_tqdm: bool = False,
        adapter: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None, **template: Any,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one conversation (a list of {role, content}) or several. `template`: tools, chat_template, add_generation_prompt, ..., and
        words that the template reads; `chat_template_kwargs`: such words too, which it need not read."""
        told = {"variables": chat_template_kwargs, **template}
        several = not isinstance(messages, str) and all(isinstance(each, list | tuple) for each in messages)
        read = [read_messages(list(c) if isinstance(c, tuple) else c, self.max_model_len) for c in (messages if several else [messages])]
        ids = [{"prompt_token_ids": self.text.chat(c, **told)} for c in read]
        return self.generate(ids, sampling_params, use_tqdm=use_tqdm, adapter=adapter)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None) -> list[EmbeddingRequestOutput]:
        """A vector of every prompt, as /v1/embeddings gives it. Raises RequestError for a prompt that does not fit."""
        kind, normalize = pooling(self.path)
        params = SamplingParams(max_tokens=0, temperature=0.0)
        requests = [request for request, _ in (self._request(p, params) for p in _listed(prompts))]
        for request in requests:
            request.pooling = kind  # type: ignore[assignment]  # which the engine refuses where it is another way
        found = {delta.request_id: delta.pooled for delta in self.tokens(requests)}
        form = Form(dimensions, normalize)
        return [EmbeddingRequestOutput(r.id, EmbeddingOutput(form.of(found[r.id]).tolist()), r.prompt_ids) for r in requests]

    def stream(self, prompt: Prompt, sampling_params: Params | None = None, *, adapter: str | None = None) -> Iterator[Delta]:
        """Deltas of one prompt as they are made. Closing the iterator ends the work."""
        request, _ = self._request(prompt, _matched(sampling_params, 1)[0], adapter)
        return self.deltas([request])

    def tokens(self, requests: Sequence[Request]) -> Iterator[TokenDelta]:
        """Token deltas of several requests as they are made, without text. Closing the iterator ends the work."""
        inbox: Inbox = queue.SimpleQueue()
        left = sum(r.params.n for r in requests)
        ids = {r.id for r in requests}
        if len(ids) < len(requests) or ids & self._inboxes.keys():
            raise RequestError("two live requests have one id; give each its own", param="request_id")
        for request in requests:
            self._inboxes[request.id] = inbox
        try:
            for request in requests:
                self._seeds.fix(request)
                self._loop.submit(request)
            while left:
                delta = inbox.get()
                if delta.error is not None:
                    raise (RequestError if delta.fault in ("request", "call") else RayNeuronError)(delta.error, param=delta.param)
                left -= delta.finish_reason is not None
                yield delta
        finally:
            for request in requests:
                self._inboxes.pop(request.id, None)
                if left:
                    self._loop.abort(request.id)

    def deltas(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Text deltas of several requests as they are made. Closing the iterator ends the work."""
        assemblers = {request.id: Assembler(request, self.text) for request in requests}
        for token_delta in self.tokens(requests):
            delta = assemblers[token_delta.request_id].push(token_delta)
            if delta is None:
                continue
            if delta.finish_reason is not None and token_delta.finish_reason is None:
                self._loop.abort(delta.request_id, delta.index)  # a stop string: no more of this choice is needed
            yield delta

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request of `tokens` early; its last delta says finish_reason "abort"."""
        self._loop.abort(request_id, index)

    def request(self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None) -> Request:
        """A request with a fresh id; `adapter`: one of `lora.lora_modules` by name. Raises UnknownModel."""
        names = self.engine.adapters.names
        if adapter is not None and adapter not in names:
            raise UnknownModel(f"there is no adapter {adapter!r}; there are {', '.join(names) or 'none (lora)'}", param="adapter")
        chosen = None if adapter is None else names[adapter]
        return Request(id=f"llm-{next(self._numbers)}", prompt_ids=list(prompt_ids), params=params, adapter=chosen)

    def close(self) -> None:
        """Stop the engine; running calls fail."""
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                inbox.put(delta)

    def _request(self, prompt: Prompt, params: SamplingParams, adapter: str | None = None) -> tuple[Request, str | None]:
        text, ids = self._ids(prompt)
        request = self.request(ids, self._with_phrases(params), adapter)
        request.cache_salt = str(prompt.get("cache_salt") or "") if isinstance(prompt, Mapping) else ""
        self.engine.validate(request)
        return request, text

    def _ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.text.encode(prompt)
        if not isinstance(prompt, Mapping):
            return None, _token_ids(prompt)
        others = [name for name in prompt if name not in ("prompt", "prompt_token_ids", "cache_salt") and prompt[name] is not None]
        if others:
            raise RequestError(f"{PROMPT}; {others[0]} is not read here, leave it out", param="prompt")
        text = prompt.get("prompt")
        if prompt.get("prompt_token_ids") is not None:
            return text, _token_ids(prompt["prompt_token_ids"])
        if not isinstance(text, str):
            raise RequestError(f"{PROMPT}, got one with {', '.join(map(str, prompt)) or 'nothing'}", param="prompt")
        return text, self.text.encode(text)

    def _with_phrases(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words or params.bad_words_ids:
            return params
        return replace(params, bad_words_ids=self.text.bad_words_ids(params.bad_words))

    def _all(self, requests: list[tuple[Request, str | None]], use_tqdm: bool) -> list[RequestOutput]:
        deltas: dict[str, list[Delta]] = {request.id: [] for request, _ in requests}
        with _bar(len(requests), use_tqdm) as bar:
            for delta in self.deltas([request for request, _ in requests]):
                deltas[delta.request_id].append(delta)
                bar.update(delta.finish_reason is not None)
        return [collect(request, prompt, deltas[request.id], self.text.token) for request, prompt in requests]


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one: text, a mapping, or a flat list of token ids."""
    if isinstance(prompts, (str, bytes, Mapping)):  # of which bytes are none
        return [prompts]
    try:
        many: list[Any] = list(prompts)
    except TypeError:
        raise RequestError(f"{PROMPT}, got {type(prompts).__name__}", param="prompt") from None
    flat = many and all(hasattr(p, "__index__") and not getattr(p, "ndim", 0) for p in many)
    return [many] if flat else many


def _token_ids(ids: Any) -> list[int]:
    try:
        if isinstance(ids, (bytes, bytearray)):
            raise TypeError
        return [operator.index(token) for token in ids]
    except TypeError:
        raise RequestError(f"{PROMPT}, got {type(ids).__name__}", param="prompt") from None


def _matched(params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, (SamplingParams, Mapping)):
        return [_params(params or SamplingParams())] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts need one sampling_params or {count}, got {len(params)}", param="sampling_params")
    return [_params(p) for p in params]


def _params(params: Params) -> SamplingParams:
    """`params` with every value of its kind; whoever makes a SamplingParams may have written anything into it."""
    given = msgspec.structs.asdict(params) if isinstance(params, SamplingParams) else params
    unknown = set(given) - set(SamplingParams.__struct_fields__)
    if unknown:
        known = ", ".join(SamplingParams.__struct_fields__)
        raise RequestError(f"{sorted(unknown)[0]!r} is no sampling parameter; known are {known}", param=sorted(unknown)[0])
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in given.items()}  # numpy's and torch's numbers
    try:
        return msgspec.convert({**plain, **_tuples(plain)}, SamplingParams, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param="sampling_params") from None


def _tuples(params: Mapping[str, Any]) -> dict[str, Any]:
    """A single text or token id stands for a list of one."""
    return {k: [params[k]] for k in ("stop", "bad_words", "stop_token_ids") if isinstance(params.get(k), (str, int))}


def _bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="generate", disable=not shown)
