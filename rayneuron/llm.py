"""LLM: the offline engine in this process."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import msgspec
from msgspec.structs import replace

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

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None, *, use_tqdm: bool = False,
        adapter: str | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Complete every prompt; results in the order of the prompts. `params`: one for all or one a prompt; `adapter`: its name.

        Default params are SamplingParams() (16 tokens at temperature 1). Raises RequestError for a wrong prompt or parameter before
        anything runs.
        """
        many = _listed(prompts)
        each = _matched(params, len(many))
        return self._all([self._request(p, s, adapter) for p, s in zip(many, each, strict=True)], use_tqdm)

    def chat(
        self, messages: Sequence[Any], params: Params | Sequence[Params] | None = None, *, use_tqdm: bool = False, **template: Any
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {role, content}) or several. `template` keywords reach the chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        ids = [{"prompt_token_ids": self.text.chat(c, **template)} for c in conversations]
        return self.generate(ids, params, use_tqdm=use_tqdm)

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

    def stream(self, prompt: Prompt, params: Params | None = None, *, adapter: str | None = None) -> Iterator[Delta]:
        """Deltas of one prompt as they are made. Closing the iterator ends the work."""
        request, _ = self._request(prompt, _matched(params, 1)[0], adapter)
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
        self.engine.validate(request)
        return request, text

    def _ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.text.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return prompt["prompt"], self.text.encode(prompt["prompt"])
            raise RequestError(f"a prompt mapping needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}", param="prompt")
        return None, list(prompt)

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
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    many = list(prompts)
    if many and all(isinstance(p, int) for p in many):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _matched(params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, (SamplingParams, Mapping)):
        return [_params(params or SamplingParams())] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts need one params or {count}, got {len(params)}", param="params")
    return [_params(p) for p in params]


def _params(params: Params) -> SamplingParams:
    if isinstance(params, SamplingParams):
        return params
    unknown = set(params) - set(SamplingParams.__struct_fields__)
    if unknown:
        known = ", ".join(SamplingParams.__struct_fields__)
        raise RequestError(f"{sorted(unknown)[0]!r} is no sampling parameter; known are {known}", param=sorted(unknown)[0])
    try:
        return msgspec.convert({**params, **_tuples(params)}, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param="params") from None


def _tuples(params: Mapping[str, Any]) -> dict[str, Any]:
    """A single stop string or token id stands for a list of one."""
    return {k: [params[k]] for k in ("stop", "stop_token_ids") if isinstance(params.get(k), (str, int))}


def _bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="generate", disable=not shown)
