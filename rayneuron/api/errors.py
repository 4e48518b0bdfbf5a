"""Error bodies: exceptions to HTTP status, OpenAI's error object and headers."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from rayneuron.errors import RayNeuronError

Triple = tuple[int, dict[str, Any], dict[str, str]]

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    507: "InsufficientStorageError",
}

_encoder = msgspec.json.Encoder()


def encode(reply: object) -> bytes:
    """JSON bytes of a reply."""
    return _encoder.encode(reply)


def same(triple: Triple) -> Triple:
    """OpenAI's errors are as they are."""
    return triple


def error_reply(status: int, message: str, param: str | None = None, retry_after_s: float | None = None) -> Triple:
    """Status, OpenAI error body and headers for a plain status and message."""
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    kind = TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": status}}, headers


def error_body(wrong: BaseException) -> Triple:
    """Status, OpenAI error body and headers of an exception.

    The text of an exception this package did not raise on purpose is never sent: it may hold paths or other people's prompts.
    """
    if not isinstance(wrong, RayNeuronError):
        return error_reply(500, "internal error; the server log has the details under this request's id")
    wait_s = wrong.retry_after_s
    if wait_s is None and wrong.retry:
        wait_s = 1.0
    return error_reply(wrong.status, wrong.message, wrong.param, wait_s)
