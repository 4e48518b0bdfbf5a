"""Many requests offline, through a model in this process: OpenAI's batch files, and rows of a Ray Data set."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import msgspec

from rayneuron.api.call import Dialect, Json
from rayneuron.api.errors import encode, error_body
from rayneuron.api.fields import decode
from rayneuron.api.routes import SPOKEN
from rayneuron.errors import ConfigError, RayNeuronError, RequestError
from rayneuron.llm import LLM
from rayneuron.serve.hot import hot

URLS: dict[str, Dialect] = {url: dialect for url, dialect in SPOKEN.items() if url.startswith("/v1/")}


class BatchLine(NamedTuple):
    """One request of a batch file."""

    custom_id: str
    url: str
    body: Json


class Answers:
    """Answers requests as a server of the model would, by status and body."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._context = hot(llm.config, llm).context
        self.window = 2 * llm.engine.capacity.rows  # enough asked for at any time to fill the rows of those that end

    def answer(self, url: str, body: Json) -> tuple[int, Json]:
        """A refusal is an answer; what is the model's own fault is raised."""
        dialect = URLS[url]
        try:
            if body.get("stream"):
                raise RequestError("a batch is answered whole; leave stream out", param="stream")
            call = dialect.parse(body, self._context, request_id=uuid4().hex, created=int(time.time()))
            reply: Json = call.reply(list(self._llm.deltas(call.requests)))
        except RayNeuronError as wrong:
            if wrong.status >= 500:
                raise
            return dialect.error(error_body(wrong))[:2]
        return 200, reply

    def all(self, lines: Iterable[BatchLine]) -> Iterator[tuple[BatchLine, tuple[int, Json]]]:
        """Lines with their answers, in the order in which these end."""
        lines = iter(lines)
        with ThreadPoolExecutor(self.window, thread_name_prefix="rayneuron-batch") as pool:
            asked: dict[Future[tuple[int, Json]], BatchLine] = {}
            try:
                while True:
                    asked.update({pool.submit(self.answer, line.url, line.body): line for line in islice(lines, self.window - len(asked))})
                    if not asked:
                        return
                    for ended in wait(asked, return_when=FIRST_COMPLETED).done:
                        yield asked.pop(ended), ended.result()
            except BaseException:
                for future in asked:
                    future.cancel()
                self._llm.close()  # else leaving the pool waits for what nobody reads any more
                raise


def lines(path: Path) -> Iterator[BatchLine]:
    """The requests of a batch file. Raises ConfigError that names file and line."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                line = _line(decode(raw))
                if line.custom_id in seen:
                    raise RequestError(f"custom_id {line.custom_id!r} is there twice; give each line its own")
            except RequestError as wrong:
                raise ConfigError(f"{path}:{number}: {wrong.message.replace('the body', 'the line', 1)}") from None
            seen.add(line.custom_id)
            yield line


def _line(said: Json) -> BatchLine:
    name, method, url, body = (said.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(name, str) or not name:
        raise RequestError("custom_id must be a text of your own, by which the answer is found")
    if method not in ("POST", None):
        raise RequestError(f"method must be POST, got {method!r}")
    if not isinstance(url, str) or url not in URLS:
        raise RequestError(f"url must be one of {', '.join(URLS)}, got {url!r}")
    if not isinstance(body, dict):
        raise RequestError("body must be an object, what the url would be sent")
    return BatchLine(name, url, body)


class Ran(NamedTuple):
    """Lines answered now, those of them refused, and those answered by an earlier run."""

    answered: int
    refused: int
    before: int


def run(llm: LLM, asked: Iterable[BatchLine], target: Path) -> Ran:
    """Answer the lines that `target` has no answer to, a line each as it ends. A run cut short is gone on with by the next."""
    answers = Answers(llm)
    with target.open("a+b") as file:
        known = _answered(file, target)
        left = [line for line in asked if line.custom_id not in known]
        refused = 0
        for line, (status, body) in answers.all(left):
            refused += status != 200
            response = {"status_code": status, "request_id": uuid4().hex, "body": body}
            file.write(encode({"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}) + b"\n")
            file.flush()
    return Ran(len(left), refused, len(known))


def _answered(file: BinaryIO, path: Path) -> set[str]:
    """The custom_ids that have an answer; a last line without its end, which an earlier run was cut off in, is taken out."""
    file.seek(0)
    known, end = set(), 0
    for number, raw in enumerate(file, 1):
        if raw.endswith(b"\n"):
            end += len(raw)
            try:
                known.add(str(msgspec.json.decode(raw)["custom_id"]))
            except (msgspec.MsgspecError, KeyError, TypeError):
                raise ConfigError(f"{path}:{number}: no line of a batch's answers; name a file that is not there yet") from None
    file.truncate(end)
    return known


class Generate:
    """Rows through a model: `dataset.map_batches(Generate, fn_constructor_kwargs={"model": "demo:smollm2"}, concurrency=1, batch_size=64)`.

    A row has `messages` or `prompt`, and what else a body may say; `params` is said for all. It gets `generated_text`, `finish_reason`,
    `num_input_tokens`, `num_generated_tokens` and `error`, which is "" or why the row was refused. Further keywords: as LLM's.
    """

    def __init__(self, model: str, params: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._answers = Answers(LLM(model, **options))
        self._params = dict(params or {})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with its answers beside it; columns are arrays or lists."""
        columns = {name: column.tolist() if hasattr(column, "tolist") else list(column) for name, column in batch.items()}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        asked = [BatchLine(str(i), _url(row), {**self._params, **_plain(row)}) for i, row in enumerate(rows)]
        told = {line.custom_id: _told(*answer) for line, answer in self._answers.all(asked)}
        each = [told[line.custom_id] for line in asked]
        return {**batch, **{name: [answer[name] for answer in each] for name in _told(400, {})}}


def _url(row: Json) -> str:
    return "/v1/chat/completions" if row.get("messages") is not None else "/v1/completions"


def _plain(value: Any) -> Any:
    """Arrays, as a table gives lists, as lists again."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _told(status: int, body: Json) -> Json:
    choice, usage = (body.get("choices") or [{}])[0], body.get("usage") or {}
    return {
        "generated_text": choice.get("text", (choice.get("message") or {}).get("content")) or "",
        "finish_reason": choice.get("finish_reason") or "",
        "num_input_tokens": usage.get("prompt_tokens", 0),
        "num_generated_tokens": usage.get("completion_tokens", 0),
        "error": "" if status == 200 else str(body.get("error", {}).get("message", "")),
    }
